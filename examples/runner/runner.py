"""The loop: schedule, run the model, sample, draft; the host is at most one step ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from ngram_npu import NgramConfig, NgramStore, scope_of
from ngram_npu.async_state import (
    AsyncConfig,
    AsyncSpecState,
    KVGroup,
    MergeConfig,
    StepInputs,
    verify_greedy,
)
from transformers import PreTrainedModel

from .draft_model import DraftModel
from .paged_model import PagedModel, to_device
from .sampling import Sampling
from .scheduler import Request, ScheduledStep, Scheduler
from .trace import Trace

NO_DRAFTS = NgramConfig(k=1, max_len=0)
"""A lookup without drafts, so that the same state also runs without speculation."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes and modes."""

    ngram: NgramConfig | None = field(default_factory=NgramConfig)
    """What drafts, from a store too if it asks for one; None: no speculation."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """With a draft model: when n-grams replace its drafts."""
    draft_window: int = 64
    """With a draft model: the newest tokens of each request that it reads."""
    engine: Literal["index", "scan", "auto"] = "auto"
    """How drafts are found (`AsyncConfig.engine`)."""
    draft_on: Literal["auto", "device", "host"] = "auto"
    """Where they are found (`AsyncConfig.draft_on`)."""
    asynchronous: bool = True
    """Whether the host schedules a step while the previous one runs."""
    padded: bool = True
    """Whether each request has k drafts in each step, padded if fewer were found: then all steps
    have one shape and the host never waits for a lookup."""
    max_rows: int = 16
    """Requests that run at once."""
    row_capacity: int = 2048
    """Tokens of the longest request."""
    block_size: int = 16
    """Tokens of a KV block."""
    num_blocks: int | None = None
    """KV blocks of all requests together; None: enough for all rows. If they do not suffice,
    requests are preempted."""
    max_step_tokens: int = 512
    """Maximum tokens of a step; a longer prompt takes several steps."""
    sampling: Sampling = field(default_factory=Sampling)
    trace: bool = False
    """Whether `Runner.trace` times the phases of each step. Its memory grows with the steps."""


@dataclass
class Figures:
    """Counts over all steps; padding does not count as drafts."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    neural_drafts: int = 0
    """Of these drafts, those that the draft model began."""
    neural_accepted: int = 0
    preemptions: int = 0


def check_draft_model(
    draft_model: PreTrainedModel, model: PreTrainedModel, config: RunnerConfig
) -> None:
    """
    Raises:
        ValueError: it cannot draft for the model.
    """
    if config.ngram is None:
        raise ValueError("Runner: draft_model: expected None without speculation")
    sizes = draft_model.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"Runner: draft_model: expected the model's vocabulary of {sizes[1]} tokens, "
            f"got {sizes[0]}"
        )
    if draft_model.device != model.device:
        raise ValueError(
            f"Runner: draft_model: expected device {model.device}, got {draft_model.device}"
        )


class Runner:
    """Generates text for many requests at once. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunnerConfig,
        *,
        store: NgramStore | None = None,
        draft_model: PreTrainedModel | None = None,
    ) -> None:
        """
        Args:
            model: a causal LM whose attention is ours (:func:`paged_model.load`).
            store: one of ``kind="torch"``, loaded or warmed, in place of its own.
            draft_model: a smaller causal LM of the same vocabulary and device, with transformers'
                own attention; it drafts where n-grams promise less.

        Raises:
            ValueError: a model whose attention is another, a draft model that does not fit, or one
                without speculation.
        """
        if draft_model is not None:
            check_draft_model(draft_model, model, config)
        self.config, self.device = config, model.device
        width = -(-config.row_capacity // config.block_size)
        num_blocks = config.num_blocks or config.max_rows * width
        self.model = PagedModel(model, num_blocks, config.block_size)
        self.state = AsyncSpecState(
            AsyncConfig(
                ngram=config.ngram or NO_DRAFTS,
                engine=config.engine if config.ngram else "scan",
                draft_on=config.draft_on if config.ngram else "device",
                max_rows=config.max_rows,
                row_capacity=config.row_capacity,
                max_step_tokens=config.max_step_tokens,
                kv_groups=(KVGroup(config.block_size, width),),
                disable_padded_drafter_batch=not config.padded,
                merge=config.merge if draft_model is not None else None,
            ),
            device=self.device,
            store=store,
        )
        self.scheduler = Scheduler(
            max_rows=config.max_rows,
            row_capacity=config.row_capacity,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_step_tokens=config.max_step_tokens,
            k=config.ngram.k if config.ngram else 0,
        )
        self.draft_model = None
        if draft_model is not None:
            self.draft_model = DraftModel(draft_model, self.scheduler.k, config.draft_window)
        self.trace = Trace(self.device, enabled=config.trace)
        self.reset_figures()
        self._in_flight: deque[ScheduledStep] = deque()
        self._has_drafts = False
        self._on_tokens: Callable[[int, list[int]], None] | None = None

    def reset_figures(self) -> None:
        """Resets counts and times."""
        self.figures = Figures()
        self.trace.clear()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop_token_ids: Iterable[int] = (),
        request_ids: Iterable[int] | None = None,
        scopes: Iterable[int | str | None] | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[list[int]]:
        """The continuation of each prompt, a stop token included.

        Args:
            request_ids: keys of each request's randomness; None: 0, 1, ...
            scopes: with a store: requests share text only within a scope; None: one scope for all.
            on_tokens: is told the id and the new tokens of each request, when they are known.

        Raises:
            ValueError: a prompt that is empty or too long for a row.
        """
        ids = range(len(prompts)) if request_ids is None else request_ids
        owners = [None] * len(prompts) if scopes is None else scopes
        stops = frozenset(stop_token_ids)
        requests = [
            Request(id, list(prompt), len(prompt) + max_new_tokens, stops, scope_of(owner))
            for id, prompt, owner in zip(ids, prompts, owners, strict=True)
        ]
        self._on_tokens = on_tokens
        self.scheduler.add(*requests)
        while self.scheduler.has_work:
            self.step()
        while self._in_flight:
            self._reconcile()
        if self.state.store is not None:  # no further step removes the last requests
            self.scheduler.clear()
            self.state.rebuild([])
            self._has_drafts = False
        return [request.output for request in requests]

    @torch.inference_mode()
    def step(self) -> None:
        """Launches one step, and gets the results of the previous one (asynchronous) or of this
        one."""
        number = self.figures.steps
        with self.trace.span("schedule", number):
            step = self._schedule()
        if step is None:
            self._reconcile()
            return
        with self.trace.span("begin", number, device=True):
            inputs = self.state.begin_step(step.batch)
        with self.trace.span("forward", number, device=True):
            logits, rows = self._forward(step, inputs)
        with self.trace.span("sample", number, device=True):
            sampled = self._sample(step, inputs, logits, rows)
        with self.trace.span("draft", number, device=True):
            drafter = None
            if self.draft_model is not None:
                drafter = partial(self.draft_model.draft, self.state, inputs)
            self.state.end_step(sampled, drafter)
        self._has_drafts = self.scheduler.k > 0
        self._in_flight.append(step)
        self.figures.steps += 1
        while len(self._in_flight) > int(self.config.asynchronous):
            self._reconcile()

    def _schedule(self) -> ScheduledStep | None:
        upper_computed = self.state.upper_num_computed_tokens
        upper_tokens = self.state.upper_num_tokens
        assert upper_computed is not None
        assert upper_tokens is not None
        found = None
        if not self.config.padded and self._has_drafts:
            found = self.state.wait_drafts().num_draft_tokens
        return self.scheduler.schedule(upper_computed, upper_tokens, found)

    def _forward(
        self, step: ScheduledStep, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [D+B,V] after each request's newest token and each of its drafts, and the flat
        positions of these tokens."""
        on_device = to_device(inputs.sample_indices, self.device)
        logits = self.model.forward(
            inputs,
            self.state.block_tables[0],
            step.batch.num_scheduled_tokens,
            step.upper_seq_lens,
            on_device,
        )
        return logits, on_device

    def _sample(
        self,
        step: ScheduledStep,
        inputs: StepInputs,
        logits: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        drafts = inputs.draft_indices
        owners = np.repeat([r.id for r in step.requests], step.batch.num_scheduled_drafts + 1)
        # The token sampled after position p gets position p + 1, by the device's count.
        scores = self.config.sampling.scores(
            logits, to_device(owners, self.device), inputs.positions[rows] + 1
        )
        return verify_greedy(
            scores,
            inputs.input_ids[to_device(drafts, self.device)],
            inputs.cu_num_scheduled_drafts,
            self.state.config.ngram.k,
        )

    def _reconcile(self) -> None:
        """Takes the tokens of the oldest step in flight."""
        with self.trace.span("reconcile", self.figures.steps - len(self._in_flight)):
            truth = self.state.reconcile()
            step = self._in_flight.popleft()
            if truth.faults:  # only with an invalid sampler; this one is valid
                raise RuntimeError(f"step {truth.step}: {dict(truth.faults)}")
            for position, request in enumerate(step.requests):
                count = truth.num_sampled[position]
                before = len(request.token_ids)
                request.take(truth.sampled_token_ids[position, :count].tolist())
                new = request.token_ids[before:]
                self.figures.tokens += len(new)
                if new and self._on_tokens is not None:
                    self._on_tokens(request.id, new)
            self.figures.drafts += int(truth.num_valid_drafts.sum())
            self.figures.accepted += int(truth.num_accepted_drafts.sum())
            if truth.draft_source is not None:
                neural = truth.draft_source % 2 == 1
                self.figures.neural_drafts += int(truth.num_valid_drafts[neural].sum())
                self.figures.neural_accepted += int(truth.num_accepted_drafts[neural].sum())
            self.figures.preemptions += step.preemptions
