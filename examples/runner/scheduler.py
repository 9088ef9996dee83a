"""Continuous batching: the scheduler chooses a step's requests, and how many tokens and drafts each
has.

The scheduler never waits for the device. It manages rows and blocks itself, and uses the state's
upper bounds for the lengths of requests while steps are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from ngram_npu.async_state import Admission, Batch, NewBlocks

Int32Array = npt.NDArray[np.int32]


@dataclass(eq=False)
class Request:
    """A prompt, its output and its scheduling state."""

    id: int
    """Names the request in errors."""
    token_ids: list[int]
    """The prompt, followed by the generated tokens that the host knows."""
    max_tokens: int
    """Maximum number of tokens of prompt and output."""
    stop_token_ids: frozenset[int] = frozenset()
    scope: int = 0
    """With a store: requests share text only within a scope."""
    num_prompt_tokens: int = 0
    row: int = -1
    """Row in the state, or -1 while the request waits."""
    blocks: list[int] = field(default_factory=list)
    position: int = -1
    """Position in the last step's batch if the request sampled there and so has drafts, else -1."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def append_sampled(self, token_ids: Sequence[int]) -> None:
        """Appends sampled tokens, up to a stop token or the maximum length."""
        for token in token_ids:
            if self.finished:
                return
            self.token_ids.append(token)
            self.finished = token in self.stop_token_ids or len(self.token_ids) >= self.max_tokens


@dataclass
class ScheduledTokens:
    """The tokens of a request in a step."""

    request: Request
    upper_computed: int
    """Upper bound of the number of computed tokens before the step: that number if all drafts in
    flight are accepted."""
    upper_length: int
    """Upper bound of the request's length before the step."""
    num_tokens: int
    """Number of tokens in this step, including drafts."""
    num_drafts: int = 0

    @property
    def is_sampling(self) -> bool:
        """Whether the request samples a token; otherwise its prefill continues in the next step."""
        return self.upper_computed + self.num_tokens >= self.upper_length


class Scheduler:
    """Manages rows, blocks, and the queues of waiting and running requests."""

    def __init__(
        self,
        *,
        max_rows: int,
        row_capacity: int,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        k: int,
    ) -> None:
        """
        Args:
            k: maximum number of drafts per request and step; 0: no speculation.
        """
        self.block_size, self.max_step_tokens, self.k = block_size, max_step_tokens, k
        self.max_length = min(row_capacity, num_blocks * block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """The requests in the order of admission; the last request is preempted first."""
        self.free_rows = list(range(max_rows))[::-1]
        self.free_blocks = list(range(num_blocks))[::-1]
        self.num_preemptions = 0
        self._removed_rows: list[int] = []

    def clear(self) -> None:
        """Removes all requests. The caller also resets the state to no requests."""
        for request in list(self.running):
            self._release_row(request)
        self.waiting.clear()
        self._removed_rows.clear()

    @property
    def has_work(self) -> bool:
        return any(not request.finished for request in (*self.running, *self.waiting))

    def add(self, *requests: Request) -> None:
        """Adds all of the requests, or raises and adds none.

        Raises:
            ValueError: a prompt is empty, max_tokens allows no output, or a request needs more
                tokens than fit in a row or in all blocks.
        """
        for request in requests:
            if not 1 <= request.num_prompt_tokens < request.max_tokens <= self.max_length:
                raise ValueError(
                    f"request {request.id}: expected a prompt of 1 token or more, and at most "
                    f"{self.max_length} tokens with its output, got {request.num_prompt_tokens} "
                    f"and {request.max_tokens}"
                )
        self.waiting += requests

    def schedule(
        self, upper_computed: Int32Array, upper_tokens: Int32Array, num_found: Int32Array | None
    ) -> tuple[Batch, list[Request]] | None:
        """Returns the next step's batch and its requests, or None if every request must wait for a
        pending step's result.

        Args:
            upper_computed, upper_tokens: [R] the state's upper bounds per row.
            num_found: [B] number of drafts that the last step's lookup found (unpadded);
                None: every request has k drafts (padded).
        """
        for request in [r for r in self.running if r.finished]:
            self._release_row(request)
        self.waiting = deque(r for r in self.waiting if not r.finished)
        old_preemptions = self.num_preemptions
        scheduled, new_blocks = self._schedule_running(upper_computed, upper_tokens, num_found)
        new = [] if self.num_preemptions > old_preemptions else self._admit_waiting(scheduled)
        if not scheduled:
            return None
        for request in self.running:
            request.position = -1
        for position, entry in enumerate(scheduled):
            if entry.is_sampling:
                entry.request.position = position
        removed_rows, self._removed_rows = self._removed_rows, []
        batch = Batch(
            rows=_to_int32_array([entry.request.row for entry in scheduled]),
            num_scheduled_tokens=_to_int32_array([entry.num_tokens for entry in scheduled]),
            num_scheduled_drafts=_to_int32_array([entry.num_drafts for entry in scheduled]),
            removed=_to_int32_array(removed_rows),
            new=new,
            new_blocks=(new_blocks,),
        )
        return batch, [entry.request for entry in scheduled]

    def _schedule_running(
        self, upper_computed: Int32Array, upper_tokens: Int32Array, num_found: Int32Array | None
    ) -> tuple[list[ScheduledTokens], NewBlocks]:
        scheduled: list[ScheduledTokens] = []
        rows: list[int] = []
        blocks: list[int] = []
        budget = self.max_step_tokens
        for request in list(self.running):
            if request.row < 0 or budget == 0:  # preempted for an earlier request, or no budget
                break
            computed, length = int(upper_computed[request.row]), int(upper_tokens[request.row])
            if length >= request.max_tokens:
                continue  # The request may be finished: wait for its exact length.
            entry = ScheduledTokens(request, computed, length, min(length - computed, budget))
            if request.position >= 0:
                # A step must not compute positions after the request's last token.
                num_drafts = min(self.k, request.max_tokens - 1 - length, budget - 1)
                if num_found is not None:
                    num_drafts = min(num_drafts, int(num_found[request.position]))
                entry.num_drafts = num_drafts
                entry.num_tokens += num_drafts
            num_missing = self._count_missing_blocks(request, computed + entry.num_tokens)
            while num_missing > len(self.free_blocks) and request.row >= 0:
                self._preempt_request(self.running[-1])
            if request.row < 0:
                break
            new_blocks = self._add_blocks(request, num_missing)
            rows += [request.row] * num_missing
            blocks += new_blocks
            scheduled.append(entry)
            budget -= entry.num_tokens
        return scheduled, NewBlocks(_to_int32_array(rows), _to_int32_array(blocks))

    def _admit_waiting(self, scheduled: list[ScheduledTokens]) -> list[Admission]:
        """Starts waiting requests while rows, blocks and the token budget suffice."""
        admissions = []
        budget = self.max_step_tokens - sum(entry.num_tokens for entry in scheduled)
        while self.waiting and self.free_rows and budget:
            request = self.waiting[0]
            length = len(request.token_ids)
            entry = ScheduledTokens(request, 0, length, min(length, budget))
            num_missing = self._count_missing_blocks(request, entry.num_tokens)
            if num_missing > len(self.free_blocks):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.row = self.free_rows.pop()
            self._add_blocks(request, num_missing)
            admissions.append(
                Admission(
                    request.row,
                    _to_int32_array(request.token_ids),
                    (_to_int32_array(request.blocks),),
                    scope=request.scope,
                )
            )
            scheduled.append(entry)
            budget -= entry.num_tokens
        return admissions

    def _count_missing_blocks(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.blocks))

    def _add_blocks(self, request: Request, count: int) -> list[int]:
        new_blocks = [self.free_blocks.pop() for _ in range(count)]
        request.blocks += new_blocks
        return new_blocks

    def _preempt_request(self, request: Request) -> None:
        """Moves a request back to the waiting queue, to be recomputed from the host's tokens.

        The host then also knows the tokens of a pending step, because each step is reconciled
        before the step after the next one is scheduled.
        """
        self._release_row(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release_row(self, request: Request) -> None:
        """Frees a request's row and blocks. Both can be reused at once, because the device executes
        the writes of pending steps before those of later steps."""
        self.running.remove(request)
        self._removed_rows.append(request.row)
        self.free_rows.append(request.row)
        self.free_blocks += request.blocks
        request.row, request.blocks, request.position = -1, [], -1


def _to_int32_array(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)
