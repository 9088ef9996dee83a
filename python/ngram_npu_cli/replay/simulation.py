"""Replays recorded conversations in a batch like that of a model runner, without a model.

A runner's state is a token buffer `[R, S]` and a length per row. Here a second buffer of the same
shape contains each row's whole recording, from which the tokens of the "target model" are read. A
conversation keeps its row for all of its turns. Then the next waiting conversation gets the row
(continuous batching).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError

from ngram_npu_cli.logs.conversations import Int32Array, TokenRequest
from ngram_npu_cli.logs.reader import Progress, ShowProgress, ignore_progress
from ngram_npu_cli.replay.replay_report import ReplayFigures

Int64Array = npt.NDArray[np.int64]


class Proposer(Protocol):
    """The drafter to measure, such as `ngram_npu.NgramProposer`.

    A step appends the sampled tokens to their rows, adds their number to `num_tokens` (both in
    place) and drafts for each row: its result has `draft_token_ids` `[B, K]`, padded with -1, and
    `num_draft_tokens` `[B]`, both int32. Two methods are optional and are called before a step:
    `reset(rows)`, rows `[N]` int32, for rows that now hold another conversation, and
    `append(token_ids, num_tokens, row_indices=...)` for rows that a prompt was written to.
    """

    @property
    def step(self) -> Callable[..., Any]:
        """`step(token_ids, num_tokens, sampled_token_ids, row_indices=..., advance=True)`."""


def simulate(
    name: str,
    requests: Sequence[TokenRequest],
    proposer: Proposer,
    *,
    k: int,
    batch_size: int,
    padded: bool = False,
    progress: ShowProgress = ignore_progress,
    observe: Callable[[Int64Array, Int64Array], None] | None = None,
) -> ReplayFigures:
    """Replays `requests` and returns their counts.

    Args:
        name: Name of the resulting figures and in the progress.
        requests: The conversations, started in this order.
        proposer: A new proposer; its rows are reused for several conversations.
        k: The number of draft tokens per step for which the proposer was configured.
        batch_size: Rows of the token buffer: the maximum number of conversations at a time.
        padded: Whether every draft is padded to `k` tokens with the newest token.
        progress: Called after each call of the proposer.
        observe: Called after each call of the proposer with the numbers of the requests that made a
            step, `[B]`, and the number of tokens drafted for each, `[B]`. No request occurs twice.

    Raises:
        InputError: The proposer's rows or lengths differ from the recording's, or its result is
            not a valid draft; the figures would be meaningless.
    """
    batch = _Batch(requests, max(1, min(batch_size, len(requests))), k, padded)
    reset: Callable[[Int32Array], object] | None = getattr(proposer, "reset", None)
    append: Callable[..., object] | None = getattr(proposer, "append", None)
    total_tokens = sum(request.num_generated for request in requests)
    drafted_lengths, accepted_lengths = np.zeros((2, k + 1), np.int64)
    num_calls = num_tokens = draft_time_ns = 0
    while len(rows := batch.find_active_rows()):
        sampled = batch.read_sampled_tokens(rows)
        # A runner passes no indices if all rows are in use.
        row_indices = None if len(rows) == batch.num_rows else rows.astype(np.int32)
        reassigned_rows, prompted_rows = batch.pop_changed_rows()
        start_ns = time.perf_counter_ns()
        if reset is not None and len(reassigned_rows):
            reset(reassigned_rows)
        if append is not None and len(prompted_rows):
            append(batch.token_ids, batch.num_tokens, row_indices=prompted_rows)
        step = proposer.step(
            batch.token_ids, batch.num_tokens, sampled, row_indices=row_indices, advance=True
        )
        draft_time_ns += time.perf_counter_ns() - start_ns
        num_calls += 1
        batch.append_sampled(rows)
        num_drafted, num_accepted, num_yielded = batch.verify(rows, step)
        drafted_lengths += np.bincount(num_drafted, minlength=k + 1)
        accepted_lengths += np.bincount(num_accepted, minlength=k + 1)
        num_tokens += int(num_yielded.sum())
        if observe is not None:
            observe(batch.request_of_row[rows], num_drafted)
        batch.advance(rows, num_yielded)
        progress(Progress(name, "replay", num_tokens, total_tokens))
    # Position j was drafted (accepted) in every step that drafted (accepted) more than j.
    drafted_per_pos = _count_per_position(drafted_lengths)
    accepted_per_pos = _count_per_position(accepted_lengths)
    return ReplayFigures(
        name=name,
        num_requests=len(requests),
        num_turns=sum(len(r.turns) for r in requests),
        num_prompt_tokens=sum(len(t.prompt) for r in requests for t in r.turns),
        num_tokens=num_tokens,
        num_steps=int(accepted_lengths.sum()),
        num_calls=num_calls,
        draft_time_ns=draft_time_ns,
        num_drafts=drafted_per_pos[0],
        num_draft_tokens=sum(drafted_per_pos),
        num_accepted_tokens=sum(accepted_per_pos),
        draft_tokens_per_pos=drafted_per_pos,
        accepted_tokens_per_pos=accepted_per_pos,
        accepted_length_counts=tuple(accepted_lengths.tolist()),
    )


def _count_per_position(length_counts: Int64Array) -> tuple[int, ...]:
    """Returns counts of lengths >= 1, >= 2, ..., >= K from counts of lengths 0..K."""
    return tuple(length_counts[::-1].cumsum()[::-1][1:].tolist())


class _Batch:
    """The rows of a model runner. A row has a running conversation or is idle.

    Attributes:
        request_of_row: Number of each row's request.
        _num_written: Number of tokens of each row that are in the buffer.
        _num_due: Number of tokens of each row that have been sampled, but not yet been passed to
            the proposer; 0 in an idle row.
        _end: Position in each row at which the current completion ends.
    """

    def __init__(self, requests: Sequence[TokenRequest], rows: int, k: int, padded: bool) -> None:
        self.num_rows = rows
        self._k, self._padded = k, padded
        capacity = max((request.num_tokens for request in requests), default=0)
        self.token_ids: Int32Array = np.zeros((rows, capacity), np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, np.int32)
        self._recorded: Int32Array = np.zeros((rows, capacity), np.int32)
        self._num_written: Int64Array = np.zeros(rows, np.int64)
        self._num_due: Int64Array = np.zeros(rows, np.int64)
        self._end: Int64Array = np.zeros(rows, np.int64)
        self.request_of_row: Int64Array = np.zeros(rows, np.int64)
        self._reassigned_rows: list[int] = []
        self._prompted_rows: list[int] = []
        self._waiting_requests: Iterator[tuple[int, TokenRequest]] = iter(enumerate(requests))
        self._spans: list[Iterator[tuple[int, int]]] = [iter(()) for _ in range(rows)]
        for row in range(rows):
            self._start_next_turn(row)

    def find_active_rows(self) -> Int64Array:
        """Returns the rows that have a conversation, ascending, `[B]`."""
        return np.flatnonzero(self._num_due).astype(np.int64, copy=False)

    def pop_changed_rows(self) -> tuple[Int32Array, Int32Array]:
        """Returns the rows that got another conversation since the last call, and the rows that a
        prompt was written to, each `[N]` and ascending."""
        reassigned, prompted = self._reassigned_rows, self._prompted_rows
        self._reassigned_rows, self._prompted_rows = [], []
        return np.unique(reassigned).astype(np.int32), np.unique(prompted).astype(np.int32)

    def read_sampled_tokens(self, rows: Int64Array) -> Int32Array:
        """Returns the tokens that the target model sampled last: `[B, K+1]`, padded with -1."""
        return self._read_recorded(rows, self._num_due[rows], self._k + 1)

    def append_sampled(self, rows: Int64Array) -> None:
        """Counts the due tokens as written, and checks that the proposer has the same lengths."""
        self._num_written[rows] += self._num_due[rows]
        if not np.array_equal(self.num_tokens[rows], self._num_written[rows]):
            raise InputError(
                "num_tokens: the proposer's value differs from the number of tokens it received"
            )

    def verify(self, rows: Int64Array, step: Any) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Compares drafts with the recording.

        Returns:
            The numbers of drafted, accepted and yielded tokens, each `[B]`.
        """
        draft = np.asarray(step.draft_token_ids)
        num_drafted = np.asarray(step.num_draft_tokens).astype(np.int64)
        if draft.shape != (len(rows), self._k) or num_drafted.shape != (len(rows),):
            raise InputError(
                f"the proposer returned drafts of shape {draft.shape} and counts of shape "
                f"{num_drafted.shape} for {len(rows)} requests and {self._k} drafts each"
            )
        if len(num_drafted) and not 0 <= num_drafted.min() <= num_drafted.max() <= self._k:
            raise InputError(f"the proposer returned a draft count outside [0, {self._k}]")
        if self._padded:
            newest = self.token_ids[rows, self._num_written[rows] - 1]
            draft = np.where(np.arange(self._k) < num_drafted[:, None], draft, newest[:, None])
            num_drafted = np.full_like(num_drafted, self._k)
        num_remaining = self._end[rows] - self._num_written[rows]
        num_comparable = np.minimum(num_drafted, num_remaining)
        recorded = self._read_recorded(rows, num_comparable, self._k)
        # Without a token, draft and recording are both -1.
        is_equal = (recorded >= 0) & (draft == recorded)
        num_accepted = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1, dtype=np.int64)
        return num_drafted, num_accepted, np.minimum(num_accepted + 1, num_remaining)

    def advance(self, rows: Int64Array, num_yielded: Int64Array) -> None:
        """Makes the yielded tokens due. Rows with a finished completion start their next turn."""
        self._num_due[rows] = num_yielded
        finished_rows = rows[self._num_written[rows] + num_yielded == self._end[rows]]
        for row in finished_rows.tolist():
            self._start_next_turn(row)

    def _read_recorded(self, rows: Int64Array, counts: Int64Array, width: int) -> Int32Array:
        """Returns the next `counts` recorded tokens of each row, `[B, width]`, padded with -1."""
        columns = np.arange(width)
        has_token = columns < counts[:, None]
        positions = np.where(has_token, self._num_written[rows][:, None] + columns, 0)
        return np.where(has_token, self._recorded[rows[:, None], positions], np.int32(-1))

    def _start_next_turn(self, row: int) -> None:
        """Starts the row's next completion; after the last, that of a waiting conversation."""
        self._check_tokens(row)
        while (span := next(self._spans[row], None)) is None:
            next_request = next(self._waiting_requests, None)
            if next_request is None:
                self._num_due[row] = 0
                return
            self.request_of_row[row], request = next_request
            # Tokens of the previous conversation stay beyond the new length, as in a runner.
            self._recorded[row, : request.num_tokens] = request.tokens()
            self._reassigned_rows.append(row)
            self._num_written[row] = 0
            self._spans[row] = iter(request.spans())
        start, end = span
        # The runner writes the prompt, and also the last tokens of the previous turn, which the
        # proposer has not received, because no draft was needed after these tokens.
        num_written = int(self._num_written[row])
        self.token_ids[row, num_written:start] = self._recorded[row, num_written:start]
        self.num_tokens[row] = start
        self._prompted_rows.append(row)
        self._num_written[row] = start
        self._end[row] = end
        self._num_due[row] = 1

    def _check_tokens(self, row: int) -> None:
        """Checks that the proposer appended the sampled tokens."""
        num_written = int(self._num_written[row])
        if not np.array_equal(self.token_ids[row, :num_written], self._recorded[row, :num_written]):
            raise InputError(
                "token_ids: the proposer's rows differ from the tokens that it received"
            )
