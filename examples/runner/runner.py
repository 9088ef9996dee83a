"""The runner's loop: schedule, forward, sample, draft. The host is at most one step ahead of the
device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from ngram_npu import NgramConfig, NgramStore, Scope, scope_of
from ngram_npu.async_state import (
    AsyncConfig,
    AsyncSpecState,
    Batch,
    KVGroup,
    verify_greedy,
)
from transformers import PreTrainedModel

from .paged_model import PagedModel, copy_to_device
from .scheduler import Request, Scheduler

NO_DRAFTS = NgramConfig(k=1, max_len=0)
"""A lookup that never drafts, so that the same state also runs without speculation."""


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes and modes of a runner."""

    ngram: NgramConfig | None = field(default_factory=NgramConfig)
    """Options of n-gram drafting; None: no speculation."""
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


@dataclass
class Figures:
    """Numbers of steps, generated tokens, drafts without padding, and accepted drafts."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Returns the token ids as a list.

    Raises:
        ValueError: an id is not an integer, or is outside the vocabulary, so that the embedding
            would be read outside its table.
    """
    tokens = list(token_ids)
    for position, token in enumerate(tokens):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(
                f"generate: {name}: expected integers from 0 to {vocab_size - 1}, got {token!r} at "
                f"position {position}"
            )
    return tokens


class Runner:
    """Generates text greedily for many requests at once. Not thread-safe."""

    def __init__(
        self, model: PreTrainedModel, config: RunnerConfig, *, store: NgramStore | None = None
    ) -> None:
        """
        Args:
            model: a causal LM that uses paged attention (:func:`paged_model.load`).
            store: a store on the model's device, from which requests also draft.

        Raises:
            ValueError: the model does not use paged attention.
        """
        self.config, self.device = config, model.device
        self._vocab_size = model.config.get_text_config().vocab_size
        blocks_per_row = -(-config.row_capacity // config.block_size)
        num_blocks = config.num_blocks or config.max_rows * blocks_per_row
        self.model = PagedModel(model, num_blocks, config.block_size)
        self.state = AsyncSpecState(
            AsyncConfig(
                ngram=config.ngram or NO_DRAFTS,
                max_rows=config.max_rows,
                row_capacity=config.row_capacity,
                max_step_tokens=config.max_step_tokens,
                kv_groups=(KVGroup(config.block_size, blocks_per_row),),
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
        self.figures = Figures()
        self._in_flight: deque[list[Request]] = deque()
        """The requests of each step whose results the host has not read."""
        self._has_drafts = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop_token_ids: Iterable[int] = (),
        scopes: Iterable[str | Scope | None] | None = None,
    ) -> list[list[int]]:
        """Returns the continuation of each prompt, including a stop token.

        After an error or an interrupt, the runner has no requests, and can be called again.

        Args:
            scopes: with a store, requests share text only within a scope; None: one scope for all.

        Raises:
            ValueError: a prompt is empty or too long for a row, or a token id is not an integer or
                not in the model's vocabulary. The runner is then unchanged.
        """
        size = self._vocab_size
        token_ids = [check_token_ids(f"prompts[{i}]", p, size) for i, p in enumerate(prompts)]
        stops = frozenset(check_token_ids("stop_token_ids", stop_token_ids, size))
        if not isinstance(max_new_tokens, int):
            raise ValueError(f"generate: max_new_tokens: expected an int, got {max_new_tokens!r}")
        scope_names = [None] * len(prompts) if scopes is None else scopes
        requests = [
            Request(i, prompt, len(prompt) + max_new_tokens, stops, scope_of(scope))
            for i, (prompt, scope) in enumerate(zip(token_ids, scope_names, strict=True))
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
        batch, requests = step
        inputs = self.state.begin_step(batch)
        # At each request's newest token and each of its drafts.
        logits = self.model.forward(
            inputs,
            self.state.block_tables[0],
            batch.num_scheduled_tokens,
            copy_to_device(inputs.sample_indices, self.device),
        )
        sampled_ids = verify_greedy(
            logits,
            inputs.input_ids[copy_to_device(inputs.draft_indices, self.device)],
            inputs.cu_num_scheduled_drafts,
            self.state.config.ngram.k,
        )
        self.state.end_step(sampled_ids)
        self._has_drafts = self.scheduler.k > 0
        self._in_flight.append(requests)
        self.figures.steps += 1
        while len(self._in_flight) > int(self.config.asynchronous):
            self._reconcile()

    def _schedule(self) -> tuple[Batch, list[Request]] | None:
        upper_computed = self.state.upper_num_computed_tokens
        upper_tokens = self.state.upper_num_tokens
        assert upper_computed is not None
        assert upper_tokens is not None
        num_found_drafts = None
        if not self.config.padded and self._has_drafts:
            num_found_drafts = self.state.wait_drafts().num_draft_tokens
        return self.scheduler.schedule(upper_computed, upper_tokens, num_found_drafts)

    def _reconcile(self) -> None:
        """Waits for the oldest step in flight and appends its tokens to the requests."""
        result = self.state.reconcile()
        requests = self._in_flight.popleft()
        if result.faults:  # only an invalid sampler causes faults
            faults = dict(result.faults)
            raise RuntimeError(f"step {result.step}: invalid sampler results by position: {faults}")
        for position, request in enumerate(requests):
            count = result.num_sampled[position]
            old_length = len(request.token_ids)
            request.append_sampled(result.sampled_token_ids[position, :count].tolist())
            self.figures.tokens += len(request.token_ids) - old_length
        self.figures.drafts += int(result.num_valid_drafts.sum())
        self.figures.accepted += int(result.num_accepted_drafts.sum())
