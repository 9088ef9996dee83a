"""Computes the drafts of a ladder and of a store at every position of recorded conversations.

Drafts of a ladder are simulated. A recording contains all tokens of a row, so the candidate for
each token can be computed in advance, and with it the draft for any limit. That shares no code with
the kernels or with their reference (``tests/ops/reference/ladder.py``); tests compare them.

Drafts of a store are recorded from its kernel. The contents of a store at a position do not depend
on earlier drafts, because accepted text is always the recording's. So one pass over the
conversations, in order and token by token, gives the drafts for any table of costs and any limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import ngram_npu._C as _C
import numpy as np
import numpy.typing as npt
from ngram_npu.store import NgramStore

from ngram_npu_cli.logs.conversations import TokenRequest

IntArray = npt.NDArray[Any]

LADDER = (1, 2, 4, 8, 16)
MAX_MATCH = 16
MAX_K = 16
STORE_SHAPE = (16, 56)
"""Shape of a store's table of costs."""


@dataclass(frozen=True)
class Counts:
    """Counts of replayed steps; the counts of several replays can be added."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens + other.tokens, self.steps + other.steps, self.drafted + other.drafted
        )

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps

    def speedup(self, cost: float) -> float:
        """Speed-up of decoding if verifying a draft token costs this fraction of a step."""
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


@dataclass(frozen=True)
class Walks:
    """The N positions of some completions at which a step may begin, and the draft of at most
    `MAX_K` tokens at each.

    Attributes:
        match: [N, K], min(m + j, 15): the row in the table of costs for draft token j.
        column: [N, K], its column in the table.
        token: [N, K], the draft.
        before: [N, K], the token before each draft token.
        length: [N], length of the draft, 0 without a match.
        right: [N], number of leading draft tokens that equal the recording.
        remaining: [N], tokens from this position to the completion's end.
    """

    match: IntArray
    column: IntArray
    token: IntArray
    before: IntArray
    length: IntArray
    right: IntArray
    remaining: IntArray

    def reached(self) -> npt.NDArray[np.bool_]:
        """Returns [N, K], whether all earlier tokens of the draft are right."""
        last = np.minimum(self.right, np.minimum(self.length, self.remaining) - 1)
        is_reached: npt.NDArray[np.bool_] = np.arange(MAX_K) <= last[:, None]
        return is_reached

    def accepted(self) -> npt.NDArray[np.bool_]:
        """Returns [N, K], whether all draft tokens up to this one equal the recording."""
        return np.arange(MAX_K) < self.right[:, None]


def _find_positions(request: TokenRequest) -> tuple[IntArray, IntArray]:
    """Returns where the steps of a request may begin, and the tokens that remain from there to the
    completion's end. A completion's first token comes from prefill."""
    spans = [(start + 1, end) for start, end in request.spans()]
    empty = np.empty(0, np.int64)
    positions = [np.arange(start, end) for start, end in spans]
    remaining = [np.arange(end - start, 0, -1) for start, end in spans]
    return np.concatenate([empty, *positions]), np.concatenate([empty, *remaining])


def _count_right(
    tokens: IntArray, positions: IntArray, remaining: IntArray, drafted: IntArray, length: IntArray
) -> IntArray:
    j = np.arange(MAX_K)
    recorded = tokens[np.minimum(positions[:, None] + j, len(tokens) - 1)]
    is_right = (drafted == recorded) & (j < np.minimum(remaining, length)[:, None])
    right: IntArray = np.logical_and.accumulate(is_right, axis=1).sum(axis=1)
    return right


def _concatenate(parts: Sequence[Walks]) -> Walks:
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Walks)
    }
    return Walks(**columns)


def walks(requests: Sequence[TokenRequest], sizes: Sequence[int] = LADDER) -> Walks:
    """Returns the drafts of a ladder for all completions of these conversations, in order."""
    return _concatenate([_walk(request, sizes) for request in requests])


def _walk(request: TokenRequest, sizes: Sequence[int]) -> Walks:
    tokens = request.tokens()
    q, m = candidates(tokens.astype(np.int64), sizes)
    outcome = outcomes(tokens, q, m)
    x, remaining = _find_positions(request)
    sources = q[x, None] + np.arange(MAX_K) % (x - q[x])[:, None]
    drafted, length = tokens[sources], np.where(m[x] > 0, MAX_K, 0)
    return Walks(
        _shrink(np.minimum(m[x, None] + np.arange(MAX_K), 15)),
        _shrink(outcome[sources]),
        drafted,
        tokens[sources - 1],  # arbitrary without a candidate
        length,
        _count_right(tokens, x, remaining, drafted, length),
        remaining,
    )


def _shrink(cells: IntArray) -> Any:
    return cells.astype(np.int16)  # these [N, K] arrays take most of the memory


def candidates(tokens: IntArray, sizes: Sequence[int] = LADDER) -> tuple[IntArray, IntArray]:
    """Returns for each x the candidate (q, m) of tokens[:x], both [n]; q = m = 0 without one.

    Each of the ``sizes`` is at most twice the previous one, and the first is at most 2.
    """
    n = len(tokens)
    x = np.arange(n)
    q = np.zeros(n, np.int64)
    ids, length = _number_values(tokens), 1
    for size in sizes:
        ids, length = _extend_grams(ids, length, size), size
        end = np.concatenate([[-1], _find_previous(ids)])[:n]  # of the gram that ends at x - 1
        q = np.where(end >= 0, end + 1, q)
    m = np.zeros(n, np.int64)
    agrees = q > 0
    for before in range(1, min(MAX_MATCH, n - 1) + 1):
        agrees &= q >= before
        agrees &= tokens[q - before] == tokens[x - before]
        m += agrees
    return q, m


def outcomes(tokens: IntArray, q: IntArray, m: IntArray) -> IntArray:
    """Returns the outcome byte of each token, [n]."""
    right = (m > 0) & (tokens[q] == tokens)
    bytes_: IntArray = np.minimum(m, 15) * 2 + right
    return bytes_


def _extend_grams(ids: IntArray, length: int, size: int) -> IntArray:
    """Numbers the grams of `size` tokens that end at each position, from the numbers of those of
    `length` tokens. A gram of at most twice the length is two shorter ones, which may overlap."""
    n = len(ids)
    shift = size - length
    pairs = n + np.arange(n)  # unique numbers where no gram of this size ends
    pairs[size - 1 :] = (ids[size - 1 - shift : n - shift] + 2) * 2 * n + ids[size - 1 :]
    return _number_values(pairs)


def _number_values(values: IntArray) -> IntArray:
    """Maps equal values to equal numbers below their count."""
    numbers: IntArray = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return numbers


def _find_previous(values: IntArray) -> IntArray:
    """Returns [n], the previous position of the same value; -1 if it is the first."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    positions = np.full(len(values), -1, np.int64)
    positions[order[1:][same]] = order[:-1][same]
    return positions


def record(requests: Sequence[TokenRequest], store: NgramStore) -> Walks:
    """Returns the drafts of a store for all completions of these conversations, one after the
    other. The store is changed: it stores the conversations."""
    return _concatenate([_record(request, store.tensor) for request in requests])


def _record(request: TokenRequest, store: Any) -> Walks:
    tokens = request.tokens()
    positions, remaining = _find_positions(request)
    rows, columns = np.indices(STORE_SHAPE, np.uint8)
    match, column = (np.zeros((len(positions), MAX_K), np.uint8) for _ in range(2))
    drafted = np.zeros((len(positions), MAX_K), np.int32)
    length = np.zeros(len(positions), np.int32)
    one, slot, no_slot = np.ones(1, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int32)
    for i, end in enumerate(positions.astype(np.int32)):
        # Drafts twice. The cost tables contain row numbers in the first call and column numbers in
        # the second, so the costs show which cell was used. Only the second call stores the token.
        for table, costs, slot_indices in ((rows, match, no_slot), (columns, column, slot)):
            length[i] = 0
            _C.ngram_store_step_(
                tokens[None],
                end[None],
                one,
                store,
                slot_indices=slot_indices,
                draft_token_ids=drafted[i : i + 1],
                num_draft_tokens=length[i : i + 1],
                match_len=np.empty(1, np.int32),
                draft_costs=costs[i : i + 1],
                costs=table,
                cost_limit=MAX_K * 255,
            )
    _C.ngram_store_finish_(store, slot)
    exists = np.arange(MAX_K) < length[:, None]
    return Walks(
        match=_shrink(np.where(exists, match, 0)),
        column=_shrink(np.where(exists, column, 0)),
        token=drafted,
        before=np.hstack([tokens[positions - 1, None], drafted[:, :-1]]),
        length=length,
        right=_count_right(tokens, positions, remaining, drafted, length),
        remaining=remaining,
    )
