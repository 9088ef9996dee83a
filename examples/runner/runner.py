"""The runner's loop: schedule, forward, sample, draft. The host is at most one step ahead of the
device."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from ngram_npu import NgramConfig, NgramStore, Scope, scope_of
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
from .paged_model import PagedModel, copy_to_device, count_position_dims
from .pipeline import Pipeline
from .sampling import Sampling
from .scheduler import Int32Array, Request, ScheduledStep, Scheduler

NO_DRAFTS = NgramConfig(k=1, max_len=0)
"""A lookup that never drafts, so that the same state also runs without speculation."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes and modes of a runner."""

    ngram: NgramConfig | None = field(default_factory=NgramConfig)
    """Options of n-gram drafting; None: no speculation."""
    merge: MergeConfig = field(default_factory=MergeConfig)
    """With a draft model: the rule by which n-gram drafts replace neural drafts."""
    draft_window: int = 64
    """Number of newest tokens of each request that the draft model reads."""
    asynchronous: bool = True
    """Whether the host schedules a step while the previous step runs."""
    padded: bool = True
    """Whether each request gets exactly k drafts per step, padded if the lookup found fewer. All
    steps then have the same shape, and the host never waits for the lookup."""
    max_rows: int = 16
    """Maximum number of requests that run at once."""
    row_capacity: int = 2048
    """Maximum number of tokens of a request."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Number of KV blocks shared by all requests; None: enough for all rows. If a step needs more
    blocks than are free, requests are preempted."""
    max_step_tokens: int = 512
    """Maximum number of tokens per step; a longer prompt takes several steps."""
    sampling: Sampling = field(default_factory=Sampling)


@dataclass
class Figures:
    """Numbers of steps, generated tokens, drafts without padding, and accepted drafts."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    neural_drafts: int = 0
    """Number of `drafts` that came from the draft model."""
    neural_accepted: int = 0
    preemptions: int = 0


def check_draft_model(
    draft_model: PreTrainedModel, model: PreTrainedModel, config: RunnerConfig
) -> None:
    """Checks that the draft model can draft for the model.

    Raises:
        ValueError: no speculation is configured, or vocabulary or device differ.
    """
    if config.ngram is None:
        raise ValueError(
            "Runner: draft_model: expected None without speculation (ngram=None), got a model"
        )
    draft_size, size = draft_model.config.vocab_size, model.config.vocab_size
    if draft_size != size:
        raise ValueError(
            f"Runner: draft_model: expected the model's vocabulary of {size} tokens, "
            f"got {draft_size}"
        )
    if draft_model.device != model.device:
        raise ValueError(
            f"Runner: draft_model: expected device {model.device}, got {draft_model.device}"
        )


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Returns token ids as Python integers.

    Raises:
        ValueError: an id is not an integer, or is outside the vocabulary, so that the embedding
            would be read outside its table.
    """
    integers = []
    for position, token in enumerate(token_ids):
        try:
            value = operator.index(token)
        except TypeError:
            value = -1
        if not 0 <= value < vocab_size:
            raise ValueError(
                f"generate: {name}: expected integers from 0 to {vocab_size - 1}, got {token!r} at "
                f"position {position}"
            )
        integers.append(value)
    return integers


class Runner:
    """Generates text for many requests at once. Not thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunnerConfig,
        *,
        store: NgramStore | None = None,
        draft_model: PreTrainedModel | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """
        Args:
            model: a causal LM that uses paged attention (:func:`paged_model.load`).
            store: a store on the model's device, from which requests also draft.
            draft_model: a smaller causal LM with the same vocabulary and device, and with
                transformers' own attention. A request uses its drafts unless more accepted tokens
                are expected of the n-gram draft.
            pipeline: with pipeline parallelism: the stage whose layers the model has
                (:func:`pipeline.keep_layers_of_stage`).

        Raises:
            ValueError: the model does not use paged attention, or :func:`check_draft_model` rejects
                the draft model, or a draft model is combined with a pipeline.
        """
        if draft_model is not None:
            if pipeline is not None:
                raise ValueError("Runner: draft_model: expected None with a pipeline, got a model")
            check_draft_model(draft_model, model, config)
        self.config, self.device = config, model.device
        self._vocab_size = model.config.get_text_config().vocab_size
        blocks_per_row = -(-config.row_capacity // config.block_size)
        num_blocks = config.num_blocks or config.max_rows * blocks_per_row
        self.pipeline = pipeline
        self.model = PagedModel(model, num_blocks, config.block_size, pipeline)
        self.state = AsyncSpecState(
            AsyncConfig(
                ngram=config.ngram or NO_DRAFTS,
                max_rows=config.max_rows,
                row_capacity=config.row_capacity,
                max_step_tokens=config.max_step_tokens,
                kv_groups=(KVGroup(config.block_size, blocks_per_row),),
                position_dims=count_position_dims(model),
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
        self.figures = Figures()
        self._in_flight: deque[ScheduledStep] = deque()
        self._has_drafts = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop_token_ids: Iterable[int] = (),
        request_ids: Iterable[int] | None = None,
        scopes: Iterable[str | Scope | None] | None = None,
        rope_positions: Iterable[tuple[Int32Array | None, int]] | None = None,
    ) -> list[list[int]]:
        """Returns the continuation of each prompt, including a stop token.

        After an error or an interrupt, the runner has no requests, and can be called again.

        Args:
            request_ids: random seeds of the requests are derived from these ids; None: 0, 1, ...
            scopes: with a store, requests share text only within a scope; None: one scope for all.
            rope_positions: with M-RoPE, `rope_positions` and `rope_delta` of each prompt's
                `Admission`, as the model's `get_rope_index` computes them; None: texts only.

        Raises:
            ValueError: a prompt is empty or too long for a row, or a token id is not an integer or
                not in the model's vocabulary. The runner is then unchanged.
        """
        size = self._vocab_size
        token_ids = [check_token_ids(f"prompts[{i}]", p, size) for i, p in enumerate(prompts)]
        stops = frozenset(check_token_ids("stop_token_ids", stop_token_ids, size))
        if not isinstance(max_new_tokens, int):
            raise ValueError(f"generate: max_new_tokens: expected an int, got {max_new_tokens!r}")
        ids = range(len(prompts)) if request_ids is None else request_ids
        scope_names = [None] * len(prompts) if scopes is None else scopes
        rope = [(None, 0)] * len(prompts) if rope_positions is None else rope_positions
        requests = [
            Request(id, prompt, len(prompt) + max_new_tokens, stops, scope_of(scope), *positions)
            for id, prompt, scope, positions in zip(ids, token_ids, scope_names, rope, strict=True)
        ]
        self.scheduler.add(*requests)
        try:
            while self.scheduler.has_work:
                self.step()
            while self._in_flight:
                self._reconcile()
        except BaseException:
            # The next call must not find requests and steps of this one.
            self._drop_requests()
            raise
        return [request.output for request in requests]

    def _drop_requests(self) -> None:
        """Removes all requests and steps in flight."""
        self.scheduler.clear()
        self._in_flight.clear()
        self._has_drafts = False
        self.state.rebuild([])

    @torch.inference_mode()
    def step(self) -> None:
        """Launches one step, then reads the results of the previous step (asynchronous) or of this
        step (synchronous)."""
        step = self._schedule()
        if step is None:
            self._reconcile()
            return
        inputs = self.state.begin_step(step.batch)
        logits, logit_indices = self._forward(step, inputs)
        if self.pipeline is None or self.pipeline.is_last:
            sampled_ids = self._sample(step, inputs, logits, logit_indices)
        else:
            shape = len(step.requests), self.state.config.ngram.k + 1
            sampled_ids = torch.empty(shape, dtype=torch.int32, device=self.device)
        if self.pipeline is not None:
            self.pipeline.share_tokens(sampled_ids)
        drafter = None
        if self.draft_model is not None:
            drafter = partial(self.draft_model.draft, self.state, inputs)
        self.state.end_step(sampled_ids, drafter)
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
        num_found_drafts = None
        if not self.config.padded and self._has_drafts:
            num_found_drafts = self.state.wait_drafts().num_draft_tokens
        return self.scheduler.schedule(upper_computed, upper_tokens, num_found_drafts)

    def _forward(
        self, step: ScheduledStep, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [L,V] at each request's newest token and each of its drafts, and the flat
        positions [L] of these tokens."""
        sample_indices = copy_to_device(inputs.sample_indices, self.device)
        logits = self.model.forward(
            inputs,
            self.state.block_tables[0],
            step.batch.num_scheduled_tokens,
            step.upper_seq_lens,
            sample_indices,
        )
        return logits, sample_indices

    def _sample(
        self,
        step: ScheduledStep,
        inputs: StepInputs,
        logits: torch.Tensor,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the [B,k+1] sampled tokens: accepted drafts, the token after them, then -1."""
        request_ids = np.repeat(
            [request.id for request in step.requests], step.batch.num_scheduled_drafts + 1
        )
        # The token sampled after position p gets position p + 1, which only the device knows.
        scores = self.config.sampling.compute_scores(
            logits, copy_to_device(request_ids, self.device), inputs.positions[logit_indices] + 1
        )
        return verify_greedy(
            scores,
            inputs.input_ids[copy_to_device(inputs.draft_indices, self.device)],
            inputs.cu_num_scheduled_drafts,
            self.state.config.ngram.k,
        )

    def _reconcile(self) -> None:
        """Waits for the oldest step in flight and appends its tokens to the requests."""
        result = self.state.reconcile()
        step = self._in_flight.popleft()
        if result.faults:  # only an invalid sampler causes faults
            faults = dict(result.faults)
            raise RuntimeError(f"step {result.step}: invalid sampler results by position: {faults}")
        for position, request in enumerate(step.requests):
            count = result.num_sampled[position]
            old_length = len(request.token_ids)
            request.append_sampled(result.sampled_token_ids[position, :count].tolist())
            self.figures.tokens += len(request.token_ids) - old_length
        self.figures.drafts += int(result.num_valid_drafts.sum())
        self.figures.accepted += int(result.num_accepted_drafts.sum())
        if result.draft_source is not None:
            is_neural = result.draft_source % 2 == 1
            self.figures.neural_drafts += int(result.num_valid_drafts[is_neural].sum())
            self.figures.neural_accepted += int(result.num_accepted_drafts[is_neural].sum())
        self.figures.preemptions += step.preemptions
