"""Computes the drafts of a ladder and of a store at every position of recorded conversations.

Drafts of a ladder are simulated. A recording contains all tokens of a row, so the candidate for
each token can be computed in advance, and with the candidate the draft for any limit. The
simulation shares no code with the kernels or with their reference
(``tests/ops/reference/ladder.py``); tests compare the results.

Drafts of a store are those of its kernel. The contents of a store at a position do not depend on
earlier drafts, because accepted text always equals the recording. So the drafts for any table of
costs and any limit follow from running the kernel once at each position of the conversations, in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ngram_npu._C as _C
import numpy as np
import numpy.typing as npt
from ngram_npu.draft_costs import SHAPES
from ngram_npu.store import NgramStore

from ngram_npu_cli.logs.conversations import TokenRequest

IntArray = npt.NDArray[Any]

LADDER = (1, 2, 4, 8, 16)
MAX_MATCH = 16
MAX_K = 16


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

    def compute_speedup(self, cost: float) -> float:
        """Returns the speed-up if verifying a draft token takes this share of a step."""
        return self.tokens_per_step / (1 + cost * self.drafted_per_step)


@dataclass(frozen=True)
class PositionDrafts:
    """The drafts of at most K = `MAX_K` tokens at the N positions of some completions at which a
    step may begin.

    Attributes:
        match: [N, K], row of each draft token in the table of costs; int16, because [N, K] arrays
            take most of the memory.
        column: [N, K] int16, column of each draft token in the table of costs.
        token: [N, K], the draft tokens.
        previous_token: [N, K], the token before each draft token.
        length: [N], length of the draft, 0 without a match.
        num_correct: [N], number of leading draft tokens that equal the recording.
        num_tokens_to_end: [N], number of tokens from this position to the completion's end.
    """

    match: IntArray
    column: IntArray
    token: IntArray
    previous_token: IntArray
    length: IntArray
    num_correct: IntArray
    num_tokens_to_end: IntArray

    def find_reached(self) -> npt.NDArray[np.bool_]:
        """Returns [N, K], whether all earlier tokens of the draft equal the recording."""
        last = np.minimum(self.num_correct, np.minimum(self.length, self.num_tokens_to_end) - 1)
        is_reached: npt.NDArray[np.bool_] = np.arange(MAX_K) <= last[:, None]
        return is_reached

    def find_accepted(self) -> npt.NDArray[np.bool_]:
        """Returns [N, K], whether all draft tokens up to this one equal the recording."""
        return np.arange(MAX_K) < self.num_correct[:, None]


def _find_positions(request: TokenRequest) -> tuple[IntArray, IntArray]:
    """Returns the positions at which a step of a request may begin, and the number of tokens from
    each position to the completion's end. Prefill generates a completion's first token."""
    spans = [(start + 1, end) for start, end in request.spans()]
    empty = np.empty(0, np.int64)
    positions = [np.arange(start, end) for start, end in spans]
    remaining = [np.arange(end - start, 0, -1) for start, end in spans]
    return np.concatenate([empty, *positions]), np.concatenate([empty, *remaining])


def _count_correct_tokens(
    tokens: IntArray, positions: IntArray, remaining: IntArray, drafted: IntArray, length: IntArray
) -> IntArray:
    j = np.arange(MAX_K)
    recorded = tokens[np.minimum(positions[:, None] + j, len(tokens) - 1)]
    is_correct = (drafted == recorded) & (j < np.minimum(remaining, length)[:, None])
    num_correct: IntArray = np.logical_and.accumulate(is_correct, axis=1).sum(axis=1)
    return num_correct


def simulate_ladder(
    requests: Sequence[TokenRequest], sizes: Sequence[int] = LADDER
) -> PositionDrafts:
    """Returns the drafts of a ladder at all positions of these conversations, in order."""
    parts = [vars(_simulate_request(request, sizes)) for request in requests]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return PositionDrafts(**columns)


def _simulate_request(request: TokenRequest, sizes: Sequence[int]) -> PositionDrafts:
    tokens = request.tokens()
    q, m = find_candidates(tokens.astype(np.int64), sizes)
    outcome_bytes = compute_outcomes(tokens, q, m)
    x, remaining = _find_positions(request)
    sources = q[x, None] + np.arange(MAX_K) % (x - q[x])[:, None]
    drafted, length = tokens[sources], np.where(m[x] > 0, MAX_K, 0)
    return PositionDrafts(
        np.minimum(m[x, None] + np.arange(MAX_K), 15).astype(np.int16),
        outcome_bytes[sources].astype(np.int16),
        drafted,
        tokens[sources - 1],  # arbitrary without a candidate
        length,
        _count_correct_tokens(tokens, x, remaining, drafted, length),
        remaining,
    )


def find_candidates(tokens: IntArray, sizes: Sequence[int] = LADDER) -> tuple[IntArray, IntArray]:
    """Returns for each position x the candidate for tokens[:x]: the position q after the match and
    the match length m, both [n]; q = m = 0 without a match.

    Each of the ``sizes`` is at most twice the previous one, and the first is at most 2.
    """
    n = len(tokens)
    x = np.arange(n)
    q = np.zeros(n, np.int64)
    ids, length = _number_values(tokens), 1
    for size in sizes:
        ids, length = _extend_ngrams(ids, length, size), size
        end = np.concatenate([[-1], _find_previous(ids)])[:n]  # end of the previous occurrence
        q = np.where(end >= 0, end + 1, q)
    m = np.zeros(n, np.int64)
    agrees = q > 0
    for before in range(1, min(MAX_MATCH, n - 1) + 1):
        agrees &= q >= before
        agrees &= tokens[q - before] == tokens[x - before]
        m += agrees
    return q, m


def compute_outcomes(tokens: IntArray, q: IntArray, m: IntArray) -> IntArray:
    """Returns [n], each token's outcome byte: min(m, 15) * 2 + whether the candidate is correct."""
    is_correct = (m > 0) & (tokens[q] == tokens)
    bytes_: IntArray = np.minimum(m, 15) * 2 + is_correct
    return bytes_


def _extend_ngrams(ids: IntArray, length: int, size: int) -> IntArray:
    """Numbers the n-grams of `size` tokens that end at each position, by the numbers of the n-grams
    of `length` tokens. The longer n-gram consists of two shorter n-grams, which may overlap."""
    n = len(ids)
    shift = size - length
    pairs = n + np.arange(n)  # a unique number where no n-gram of this size ends
    pairs[size - 1 :] = (ids[size - 1 - shift : n - shift] + 2) * 2 * n + ids[size - 1 :]
    return _number_values(pairs)


def _number_values(values: IntArray) -> IntArray:
    """Maps equal values to equal numbers from 0 to the number of different values - 1."""
    numbers: IntArray = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return numbers


def _find_previous(values: IntArray) -> IntArray:
    """Returns [n], the previous position of the same value; -1 if there is none."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    positions = np.full(len(values), -1, np.int64)
    positions[order[1:][same]] = order[:-1][same]
    return positions


def record_store(request: TokenRequest, store: NgramStore) -> PositionDrafts:
    """Returns the drafts of a store at all positions of a conversation, in order. The store then
    contains the conversation."""
    tokens = request.tokens()
    positions, remaining = _find_positions(request)
    rows, columns = np.indices(SHAPES["store"], np.uint8)
    match, column = (np.zeros((len(positions), MAX_K), np.uint8) for _ in range(2))
    drafted = np.zeros((len(positions), MAX_K), np.int32)
    length = np.zeros(len(positions), np.int32)
    num_sampled, slot, no_slot = (np.full(1, value, np.int32) for value in (1, 0, -1))
    for i, end in enumerate(positions.astype(np.int32)):
        # The kernel drafts twice. The table of costs contains row numbers in the first call and
        # column numbers in the second call, so the costs show which cell was used. Only the second
        # call stores the token.
        for table, costs, slot_indices in ((rows, match, no_slot), (columns, column, slot)):
            length[i] = 0
            _C.ngram_store_step_(
                tokens[None],
                end[None],
                num_sampled,
                store.tensor,
                slot_indices=slot_indices,
                draft_token_ids=drafted[i : i + 1],
                num_draft_tokens=length[i : i + 1],
                match_len=np.empty(1, np.int32),
                draft_costs=costs[i : i + 1],
                costs=table,
                cost_limit=MAX_K * 255,
            )
    _C.ngram_store_finish_(store.tensor, slot)
    has_token = np.arange(MAX_K) < length[:, None]
    return PositionDrafts(
        match=np.where(has_token, match, 0).astype(np.int16),
        column=np.where(has_token, column, 0).astype(np.int16),
        token=drafted,
        previous_token=np.hstack([tokens[positions - 1, None], drafted[:, :-1]]),
        length=length,
        num_correct=_count_correct_tokens(tokens, positions, remaining, drafted, length),
        num_tokens_to_end=remaining,
    )
