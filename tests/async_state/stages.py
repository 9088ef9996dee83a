"""The stages of a pipeline: each has a state on its own device, and a part of the model. The last
stage samples, and sends its results to the others (docs/guides/own-runner.md)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from ngram_npu import NgramConfig
from ngram_npu.async_state import (
    AsyncConfig,
    AsyncSpecState,
    Batch,
    MergeConfig,
    NeuralDrafts,
    StepInputs,
    StepOutputs,
)

from async_state.devices import Countdown, get_value, make_store
from async_state.scenario import Scenario
from async_state.simulated_model import LaunchedStep, SimulatedModel


def make_config_without_lookup(config: AsyncConfig) -> AsyncConfig:
    """Returns the configuration of a stage that receives its drafts from the last stage."""
    ngram = NgramConfig(k=config.ngram.k, max_len=0, vocab_size=config.ngram.vocab_size)
    return replace(config, ngram=ngram, merge=MergeConfig())


STORE_TOKENS = 1 << 14


class Message:
    """A tensor that one device sends to others, after the work enqueued so far."""

    def __init__(self, device: Any, tensor: torch.Tensor) -> None:
        self._values: list[torch.Tensor] = []
        self.shape, self.dtype = tensor.shape, tensor.dtype
        source = get_value(tensor)
        device.launch(lambda: self._values.append(source.clone()))
        self._event = device.record("main")

    def receive(self, device: Any) -> torch.Tensor:
        """Returns a tensor that contains the values for later work on the device's main stream."""
        tensor: torch.Tensor = device.tensor(self.shape, self.dtype)
        target = get_value(tensor)
        device.wait("main", self._event)
        device.launch(lambda: target.copy_(self._values[0]))
        return tensor


class Stage:
    """A stage, and the rule by which it launches a step."""

    def __init__(
        self, scenario: Scenario, number: int, invalid_requests: set[tuple[int, int]]
    ) -> None:
        self.scenario = scenario
        self.is_last = number == scenario.num_stages - 1
        config = scenario.config
        if not self.is_last and scenario.sends_drafts:
            config = make_config_without_lookup(config)
        self.device = scenario.make_device(number)
        store = None
        if self.is_last and scenario.has_store:
            store = make_store(self.device, STORE_TOKENS, scenario.max_rows)
        self.state = AsyncSpecState(config, runtime=self.device, store=store)
        self.failure_countdown = Countdown(self.state)
        self.model = SimulatedModel(scenario, self.state, self.device, number, invalid_requests)

    def begin_step(self, batch: Batch) -> StepInputs:
        with self.device.forbid_waits():
            if not self.scenario.uses_graphs:
                return self.state.begin_step(batch)
            inputs = self.state.begin_step(batch, correct=False)
            has_padding = self.scenario.has_padded_graphs
            count = self.scenario.max_rows if has_padding else len(batch.rows)
            self.device.replay(count, functools.partial(self.state.correct_inputs, count))
            return inputs

    def sample(self, inputs: StepInputs, step: LaunchedStep) -> list[Message]:
        """Launches the last stage's part of a step, and sends its results to the other stages."""
        sampled = self.model.make_sampled_tensor(len(step.requests))
        self.model.launch_forward(inputs, sampled, step)
        messages = [Message(self.device, sampled)]
        with self.device.forbid_waits():
            if self.scenario.neural:
                drafter = functools.partial(self.model.launch_neural_drafts, inputs, step)
                outputs = self.state.end_step(sampled, drafter)
            else:
                outputs = self.state.end_step(sampled)
                self.model.launch_drafter_batch_check(outputs, step)
                if self.scenario.has_store:
                    self.model.launch_store_check(inputs, outputs, step)
        drafts = outputs.draft_token_ids, outputs.num_draft_tokens
        return [*messages, *(Message(self.device, tensor) for tensor in drafts)]

    def receive(self, inputs: StepInputs, messages: list[Message], step: LaunchedStep) -> None:
        """Ends a step of another stage with the results of the last stage."""
        sampled, drafts, counts = messages
        with self.device.forbid_waits():
            outputs: StepOutputs
            if self.scenario.sends_drafts:
                neural = functools.partial(self._receive_drafts, drafts, counts)
                outputs = self.state.end_step(sampled.receive(self.device), neural)
            else:
                outputs = self.state.end_step(sampled.receive(self.device))
            self.model.launch_drafter_batch_check(outputs, step)

    def _receive_drafts(
        self, drafts: Message, counts: Message, outputs: StepOutputs
    ) -> NeuralDrafts:
        return NeuralDrafts(drafts.receive(self.device), counts.receive(self.device))
