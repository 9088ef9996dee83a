"""The replay loop: a model runner's batch, with recordings in place of the model.

A runner's state is a token buffer `[R, S]` and a length per row. Here a second buffer of the same
shape holds each row's whole recording, from which the "target model" reads its tokens. A
conversation keeps its row for all of its turns; then the next waiting conversation gets the row
(continuous batching).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError

from ngram_npu_cli.replay.figures import ReplayFigures

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class StepResult(Protocol):
    """The parts of a proposer's result that the replay uses."""

    @property
    def draft_token_ids(self) -> Any:
        """[B, K] int32, unused places -1."""

    @property
    def num_draft_tokens(self) -> Any:
        """[B] int32."""


class Proposer(Protocol):
    """The drafter under test; `ngram_npu.NgramProposer` is one.

    A step appends the sampled tokens to their rows, adds their number to `num_tokens` (both in
    place) and drafts for each row. Two methods are optional and are called before a step:
    `reset(rows)`, rows `[N]` int32, for rows that now hold another conversation, and
    `append(token_ids, num_tokens, row_indices=...)` for rows that a prompt was written to.
    """

    @property
    def step(self) -> Callable[..., StepResult]:
        """`step(token_ids, num_tokens, sampled_token_ids, row_indices=..., advance=True)`."""


@dataclass(frozen=True)
class TokenTurn:
    """A turn as token ids, both one-dimensional int32; either may be empty."""

    prompt: Int32Array
    completion: Int32Array


@dataclass(frozen=True)
class TokenRequest:
    """A conversation as token ids."""

    id: str
    turns: tuple[TokenTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the whole context at the end of the last turn."""
        return sum(len(turn.prompt) + len(turn.completion) for turn in self.turns)

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of every completion that takes a step, as offsets into `tokens()`.

        Prefill generates a completion's first token, so a completion of one token or none takes no
        step: it is only context for the next turns.
        """
        spans: list[tuple[int, int]] = []
        offset = 0
        for turn in self.turns:
            start = offset + len(turn.prompt)
            offset = start + len(turn.completion)
            if offset - start >= 2:
                spans.append((start, offset))
        return spans

    def turns_apart(self) -> list[TokenRequest]:
        """Each turn as a separate request, with all earlier turns in its prompt."""
        apart, said = [], np.empty(0, np.int32)
        for turn in self.turns:
            prompt = np.concatenate([said, turn.prompt])
            apart.append(TokenRequest(self.id, (TokenTurn(prompt, turn.completion),)))
            said = np.concatenate([prompt, turn.completion])
        return apart

    def tokens(self) -> Int32Array:
        """All turns joined, `[num_tokens]` int32."""
        parts = [part for turn in self.turns for part in (turn.prompt, turn.completion)]
        joined: Int32Array = np.concatenate([np.empty(0, np.int32), *parts])
        return joined


def simulate(
    name: str,
    requests: Sequence[TokenRequest],
    proposer: Proposer,
    *,
    k: int,
    batch_size: int,
    padded: bool = False,
    progress: Callable[[int, int], None] | None = None,
    observe: Callable[[Int64Array, Int64Array], None] | None = None,
) -> ReplayFigures:
    """Replay `requests` and count.

    Args:
        name: given to the figures.
        requests: the conversations, started in this order.
        proposer: a fresh one; its rows change from one conversation to another.
        k: the number of draft tokens per step that the proposer was configured for.
        batch_size: rows of the token buffer: the maximum number of conversations at a time.
        padded: every draft has `k` tokens: the newest token fills it up.
        progress: called with (tokens done, tokens in all), both in generated tokens.
        observe: called after each call of the proposer with (numbers of the requests that made a
            step, number of tokens drafted for them), both `[B]`; each request occurs once.

    Raises:
        InputError: the proposer's rows or lengths differ from the recording's, or its result is
            not a valid draft; the figures would be meaningless.
    """
    batch = _Batch(requests, max(1, min(batch_size, len(requests))), k, padded)
    counts = _Counts(k)
    reset: Callable[[Int32Array], object] | None = getattr(proposer, "reset", None)
    append: Callable[..., object] | None = getattr(proposer, "append", None)
    num_tokens_in_all = sum(end - start - 1 for r in requests for start, end in r.spans())
    while len(rows := batch.active_rows()):
        sampled = batch.sampled_token_ids(rows)
        # A runner passes no indices if all rows are in use.
        row_indices = None if len(rows) == batch.num_rows else rows.astype(np.int32)
        new_holders, prompted = batch.take_new_holders(), batch.take_prompted()
        started = time.perf_counter_ns()
        if reset is not None and len(new_holders):
            reset(new_holders)
        if append is not None and len(prompted):
            append(batch.token_ids, batch.num_tokens, row_indices=prompted)
        step = proposer.step(
            batch.token_ids, batch.num_tokens, sampled, row_indices=row_indices, advance=True
        )
        counts.draft_time_ns += time.perf_counter_ns() - started
        counts.num_calls += 1
        batch.note_sampled(rows)
        num_draft_tokens, num_accepted, num_yielded = batch.verify(rows, step)
        counts.add(num_draft_tokens, num_accepted, num_yielded)
        if observe is not None:
            observe(batch.holders[rows], num_draft_tokens)
        batch.move_on(rows, num_yielded)
        if progress is not None:
            progress(counts.num_tokens, num_tokens_in_all)
    return counts.figures(name, requests)


@dataclass
class _Counts:
    k: int
    num_calls: int = 0
    draft_time_ns: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    drafted_lengths: Int64Array = field(init=False)
    accepted_lengths: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        self.drafted_lengths = np.zeros(self.k + 1, np.int64)
        self.accepted_lengths = np.zeros(self.k + 1, np.int64)

    def add(self, drafted: Int64Array, accepted: Int64Array, yielded: Int64Array) -> None:
        """One step of each request in the batch, all `[B]`."""
        self.num_steps += len(yielded)
        self.num_tokens += int(yielded.sum())
        self.drafted_lengths += np.bincount(drafted, minlength=self.k + 1)
        self.accepted_lengths += np.bincount(accepted, minlength=self.k + 1)

    def figures(self, name: str, requests: Sequence[TokenRequest]) -> ReplayFigures:
        # Position j was drafted (accepted) in every step that drafted (accepted) more than j.
        drafted_per_pos = _at_least(self.drafted_lengths)
        accepted_per_pos = _at_least(self.accepted_lengths)
        return ReplayFigures(
            name=name,
            num_requests=len(requests),
            num_turns=sum(len(r.turns) for r in requests),
            num_prompt_tokens=sum(len(t.prompt) for r in requests for t in r.turns),
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            num_calls=self.num_calls,
            draft_time_ns=self.draft_time_ns,
            num_drafts=drafted_per_pos[0],
            num_draft_tokens=sum(drafted_per_pos),
            num_accepted_tokens=sum(accepted_per_pos),
            draft_tokens_per_pos=drafted_per_pos,
            accepted_tokens_per_pos=accepted_per_pos,
            accepted_length_counts=tuple(self.accepted_lengths.tolist()),
        )


def _at_least(length_counts: Int64Array) -> tuple[int, ...]:
    """Counts of lengths >= 1, >= 2, ..., >= K from counts of lengths 0..K."""
    return tuple(length_counts[::-1].cumsum()[::-1][1:].tolist())


def _take(rows: list[int]) -> Int32Array:
    """The different rows of a list, `[N]`; empties the list."""
    taken = np.unique(np.array(rows, np.int32))
    rows.clear()
    return taken


class _Batch:
    """Rows of a model runner, each with a running conversation or idle.

    Per row, in token positions of the row: `cursor` tokens are in the buffer, `due` more have been
    sampled but not yet passed to the proposer, the current completion ends at `end`. `holders` is
    the number of the row's request.
    """

    def __init__(self, requests: Sequence[TokenRequest], rows: int, k: int, padded: bool) -> None:
        self.num_rows = rows
        self._k, self._padded = k, padded
        capacity = max((request.num_tokens for request in requests), default=0)
        self.token_ids: Int32Array = np.zeros((rows, capacity), np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, np.int32)
        self._recorded: Int32Array = np.zeros((rows, capacity), np.int32)
        self._cursor: Int64Array = np.zeros(rows, np.int64)
        self._due: Int64Array = np.zeros(rows, np.int64)
        self._end: Int64Array = np.zeros(rows, np.int64)
        self._active = np.zeros(rows, np.bool_)
        self.holders: Int64Array = np.zeros(rows, np.int64)
        self._new_holders: list[int] = []
        self._prompted: list[int] = []
        self._waiting: Iterator[tuple[int, TokenRequest]] = iter(enumerate(requests))
        self._spans: list[Iterator[tuple[int, int]]] = [iter(()) for _ in range(rows)]
        for row in range(rows):
            self._next_turn(row)

    def active_rows(self) -> Int64Array:
        """Rows with a conversation, ascending, `[B]`."""
        return np.flatnonzero(self._active).astype(np.int64, copy=False)

    def take_new_holders(self) -> Int32Array:
        """Rows that got another conversation since the last call, `[N]`."""
        return _take(self._new_holders)

    def take_prompted(self) -> Int32Array:
        """Rows that a prompt was written to since the last call, `[N]`."""
        return _take(self._prompted)

    def sampled_token_ids(self, rows: Int64Array) -> Int32Array:
        """The due tokens: what the target model sampled last, `[B, K+1]`, padded with -1."""
        return self._recorded_from(rows, self._due[rows], self._k + 1)

    def note_sampled(self, rows: Int64Array) -> None:
        """Counts the due tokens as written; checks that the proposer's lengths agree."""
        self._cursor[rows] += self._due[rows]
        if not np.array_equal(self.num_tokens[rows], self._cursor[rows]):
            raise InputError("the proposer's num_tokens is not the number of tokens given to it")

    def verify(
        self, rows: Int64Array, step: StepResult
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Compare drafts with the recording: drafted, accepted and yielded tokens, each `[B]`."""
        draft = np.asarray(step.draft_token_ids)
        drafted = np.asarray(step.num_draft_tokens).astype(np.int64)
        if draft.shape != (len(rows), self._k) or drafted.shape != (len(rows),):
            raise InputError(
                f"the proposer returned drafts of shape {draft.shape} and counts of shape "
                f"{drafted.shape} for {len(rows)} requests and {self._k} drafts each"
            )
        if len(drafted) and not 0 <= drafted.min() <= drafted.max() <= self._k:
            raise InputError(f"the proposer returned a draft count outside [0, {self._k}]")
        if self._padded:
            newest = self.token_ids[rows, self._cursor[rows] - 1]
            draft = np.where(np.arange(self._k) < drafted[:, None], draft, newest[:, None])
            drafted = np.full_like(drafted, self._k)
        remaining = self._end[rows] - self._cursor[rows]
        comparable = np.minimum(drafted, remaining)
        truth = self._recorded_from(rows, comparable, self._k)
        equal = (truth >= 0) & (draft == truth)  # both are -1 where there is no token
        accepted = np.logical_and.accumulate(equal, axis=1).sum(axis=1, dtype=np.int64)
        return drafted, accepted, np.minimum(accepted + 1, remaining)

    def move_on(self, rows: Int64Array, num_yielded: Int64Array) -> None:
        """Makes the yielded tokens due; a row whose completion is done starts its next turn."""
        self._due[rows] = num_yielded
        done = rows[self._cursor[rows] + num_yielded == self._end[rows]]
        for row in done.tolist():
            self._next_turn(row)

    def _recorded_from(self, rows: Int64Array, counts: Int64Array, width: int) -> Int32Array:
        """`[B, width]`: the next `counts` recorded tokens of each row, then -1."""
        columns = np.arange(width)
        wanted = columns < counts[:, None]
        positions = np.where(wanted, self._cursor[rows][:, None] + columns, 0)
        return np.where(wanted, self._recorded[rows[:, None], positions], np.int32(-1))

    def _next_turn(self, row: int) -> None:
        """Prefill the row's next completion, or a waiting conversation if its own is done."""
        self._check_tokens(row)
        span = next(self._spans[row], None)
        while span is None:
            waiting = next(self._waiting, None)
            if waiting is None:
                self._active[row] = False
                return
            self.holders[row], request = waiting
            # Tokens of the previous conversation stay beyond the new length, as in a runner.
            self._recorded[row, : request.num_tokens] = request.tokens()
            self._new_holders.append(row)
            self._cursor[row] = 0
            self._spans[row] = iter(request.spans())
            span = next(self._spans[row], None)
        start, end = span
        # The runner writes the prompt, and also the last tokens of the previous turn: the proposer
        # has not seen them because no draft was needed after them.
        held = int(self._cursor[row])
        self.token_ids[row, held:start] = self._recorded[row, held:start]
        self.num_tokens[row] = start
        self._prompted.append(row)
        self._cursor[row] = start
        self._end[row] = end
        self._due[row] = 1
        self._active[row] = True

    def _check_tokens(self, row: int) -> None:
        """Checks that the proposer appended the sampled tokens."""
        held = int(self._cursor[row])
        if not np.array_equal(self.token_ids[row, :held], self._recorded[row, :held]):
            raise InputError("the proposer's token_ids are not the tokens given to it")
