"""Continuous batching: the requests of the next step, with their numbers of tokens and drafts.

It never waits for a count from the device. It manages rows and blocks itself; for the lengths of
requests it uses the state's upper bounds while steps are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from ngram_npu.async_state import Admission, Batch, NewBlocks
from ngram_npu.host_drafting import Stop

Int32Array = npt.NDArray[np.int32]


@dataclass(eq=False)
class Request:
    """A prompt, its output and its state."""

    id: int
    """The key of its randomness in sampling."""
    token_ids: list[int]
    """The prompt, then the generated tokens known to the host."""
    max_tokens: int
    """Prompt and output together."""
    stop_token_ids: frozenset[int] = frozenset()
    scope: int = 0
    """With a store: the scope of its text."""
    num_prompt_tokens: int = 0
    row: int = -1
    """-1 while it waits."""
    blocks: list[int] = field(default_factory=list)
    position: int = -1
    """Position in the last step's batch if it sampled there: then it has drafts."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def take(self, token_ids: Sequence[int]) -> None:
        """Appends sampled tokens, up to a stop token or the last token allowed."""
        for token in token_ids:
            if self.finished:
                return
            self.token_ids.append(token)
            self.finished = token in self.stop_token_ids or len(self.token_ids) >= self.max_tokens


@dataclass
class Share:
    """A request's share of a step."""

    request: Request
    computed: int
    """Upper bound of the tokens stored before the step: drafts in flight count as accepted."""
    known: int
    """Upper bound of the tokens before the step."""
    tokens: int
    """Tokens in this step, drafts included."""
    drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether it samples a token; otherwise its prompt continues in the next step."""
        return self.computed + self.tokens >= self.known


@dataclass
class ScheduledStep:
    batch: Batch
    requests: list[Request]
    upper_seq_lens: Int32Array
    """[B] upper bounds of each request's length after the step's tokens are stored."""
    preemptions: int
    """Requests that were preempted for the step."""


class Scheduler:
    """Rows, blocks, and the queues of waiting and running requests."""

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
            k: drafts per request and step; 0: no speculation.
        """
        self.block_size, self.max_step_tokens, self.k = block_size, max_step_tokens, k
        self.longest = min(row_capacity, num_blocks * block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """The longest-running first; the last one is preempted first."""
        self.free_rows = list(range(max_rows))[::-1]
        self.free_blocks = list(range(num_blocks))[::-1]
        self._preemptions = 0
        """Since the last step."""
        self._removed: list[int] = []

    def clear(self) -> None:
        """All requests have finished, and a state that is rebuilt without any has removed them."""
        for request in list(self.running):
            self._leave(request)
        self.waiting.clear()
        self._removed.clear()

    @property
    def has_work(self) -> bool:
        return any(not request.finished for request in (*self.running, *self.waiting))

    def add(self, *requests: Request) -> None:
        """Adds all of the requests or none.

        Raises:
            ValueError: no token to generate, or more tokens than a row or all blocks hold.
        """
        for request in requests:
            if not 1 <= request.num_prompt_tokens < request.max_tokens <= self.longest:
                raise ValueError(
                    f"request {request.id}: expected a prompt of 1 token or more, and at most "
                    f"{self.longest} tokens with its output, got {request.num_prompt_tokens} and "
                    f"{request.max_tokens}"
                )
        self.waiting += requests

    def schedule(
        self, upper_computed: Int32Array, upper_tokens: Int32Array, found: Int32Array | None
    ) -> ScheduledStep | None:
        """The next step; None if no request can continue before a pending step is reconciled.

        Args:
            upper_computed, upper_tokens: [R] by row, the state's upper bounds.
            found: [B] drafts that the last step's lookup found (unpadded), or None: every request
                has k drafts, found or not (padded).
        """
        for request in [r for r in self.running if r.finished]:
            self._leave(request)
        self.waiting = deque(r for r in self.waiting if not r.finished)
        before = self._preemptions
        shares, new_blocks = self._schedule_running(upper_computed, upper_tokens, found)
        new = [] if self._preemptions > before else self._admit(shares)
        if not shares:
            return None
        for request in self.running:
            request.position = -1
        for position, share in enumerate(shares):
            if share.samples:
                share.request.position = position
        removed, self._removed = self._removed, []
        preemptions, self._preemptions = self._preemptions, 0
        batch = Batch(
            rows=_int32([share.request.row for share in shares]),
            num_scheduled_tokens=_int32([share.tokens for share in shares]),
            num_scheduled_drafts=_int32([share.drafts for share in shares]),
            removed=_int32(removed),
            new=new,
            new_blocks=(new_blocks,),
        )
        return ScheduledStep(
            batch,
            [share.request for share in shares],
            _int32([share.computed + share.tokens for share in shares]),
            preemptions,
        )

    def _schedule_running(
        self, upper_computed: Int32Array, upper_tokens: Int32Array, found: Int32Array | None
    ) -> tuple[list[Share], NewBlocks]:
        shares: list[Share] = []
        rows: list[int] = []
        blocks: list[int] = []
        budget = self.max_step_tokens
        for request in list(self.running):
            if request.row < 0 or budget == 0:  # preempted for one before it; nothing left
                break
            computed, known = int(upper_computed[request.row]), int(upper_tokens[request.row])
            if known >= request.max_tokens:
                continue  # it may be done: wait for the exact length
            share = Share(request, computed, known, min(known - computed, budget))
            if request.position >= 0:
                # No step may exceed the request's last token.
                share.drafts = min(self.k, request.max_tokens - 1 - known, budget - 1)
                if found is not None:
                    share.drafts = min(share.drafts, int(found[request.position]))
                share.tokens += share.drafts
            missing = self._missing_blocks(request, computed + share.tokens)
            while missing > len(self.free_blocks) and request.row >= 0:
                self._preempt(self.running[-1])
            if request.row < 0:
                break
            given = self._give_blocks(request, missing)
            rows += [request.row] * len(given)
            blocks += given
            shares.append(share)
            budget -= share.tokens
        return shares, NewBlocks(_int32(rows), _int32(blocks))

    def _admit(self, shares: list[Share]) -> list[Admission]:
        admissions = []
        budget = self.max_step_tokens - sum(share.tokens for share in shares)
        while self.waiting and self.free_rows and budget:
            request = self.waiting[0]
            known = len(request.token_ids)
            share = Share(request, 0, known, min(known, budget))
            missing = self._missing_blocks(request, share.tokens)
            if missing > len(self.free_blocks):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.row = self.free_rows.pop()
            self._give_blocks(request, missing)
            admissions.append(
                Admission(
                    request.row,
                    _int32(request.token_ids),
                    (_int32(request.blocks),),
                    scope=request.scope,
                    stop=Stop(tuple(request.stop_token_ids), request.max_tokens),
                )
            )
            shares.append(share)
            budget -= share.tokens
        return admissions

    def _missing_blocks(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.blocks))

    def _give_blocks(self, request: Request, count: int) -> list[int]:
        given = [self.free_blocks.pop() for _ in range(count)]
        request.blocks += given
        return given

    def _preempt(self, request: Request) -> None:
        """Preempts a request, which will be recomputed from the tokens known to the host. Those of
        a pending step are known by then: it is reconciled before the second next step."""
        self._leave(request)
        self.waiting.appendleft(request)
        self._preemptions += 1

    def _leave(self, request: Request) -> None:
        """Frees its row and blocks at once: on the device, writes of pending steps come before
        later ones."""
        self.running.remove(request)
        self._removed.append(request.row)
        self.free_rows.append(request.row)
        self.free_blocks += request.blocks
        request.row, request.blocks, request.position = -1, [], -1


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)
