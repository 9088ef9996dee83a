"""Drafts of a row, simulated for all of its places at once.

A recording contains all tokens of a row, so the candidate for each token can be computed in
advance, and with it the draft for any limit. It shares no code with the kernels or with their
reference (``ngram_npu.reference.ladder``), and a test compares it with the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ngram_npu.replay import TokenRequest

IntArray = npt.NDArray[np.int64]

LADDER = (1, 2, 4, 8, 16)
MAX_MATCH = 16
MAX_K = 16


@dataclass(frozen=True)
class Counts:
    """Counts of replayed steps; those of several replays can be added."""

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
    """The N places of some completions at which a draft may be asked for, and the draft of
    `MAX_K` tokens there.

    Attributes:
        match: [N, K], min(m + j, 15): the table's row for the draft's token j.
        outcome: [N, K], the table's column: the byte beside the token that is drafted.
        found: [N], whether there is a candidate.
        right: [N], how many leading draft tokens agree with the recording.
        remaining: [N], tokens from this place to the completion's end.
        room: [N], tokens from the candidate's place to the row's end: a draft without overlap is
            not longer.
    """

    match: IntArray
    outcome: IntArray
    found: npt.NDArray[np.bool_]
    right: IntArray
    remaining: IntArray
    room: IntArray

    def reached(self) -> npt.NDArray[np.bool_]:
        """[N, K], where a draft token meets the recording after none that was wrong."""
        j = np.arange(self.match.shape[1])
        last = np.minimum(self.right, self.remaining - 1)
        return self.found[:, None] & (j <= last[:, None])

    def lengths(self, costs: IntArray, limit: int, k: int) -> IntArray:
        """[N], how many of k tokens are drafted with this table [16, 32] and this limit."""
        paid = np.cumsum(costs[self.match[:, :k], self.outcome[:, :k]], axis=1)
        lengths: IntArray = (self.found[:, None] & (paid <= limit)).sum(axis=1)
        return lengths

    def steps(self, lengths: IntArray) -> IntArray:
        """The places at which a replay with these draft lengths makes its steps."""
        yielded = np.minimum(np.minimum(self.right, lengths) + 1, self.remaining).tolist()
        places = []
        at = 0
        while at < len(yielded):
            places.append(at)
            at += yielded[at]
        return np.array(places, np.int64)

    def replay(self, lengths: IntArray) -> Counts:
        places = self.steps(lengths)
        return Counts(len(lengths), len(places), int(lengths[places].sum()))


def walks(
    requests: Sequence[TokenRequest], sizes: Sequence[int] = LADDER, cap: int = MAX_MATCH
) -> Walks:
    """The walks of all completions of these conversations, in order."""
    parts = [_walks_of(request, sizes, cap) for request in requests]
    columns = zip(*parts, strict=True)
    return Walks(*(np.concatenate(list(column)) for column in columns))


def _walks_of(
    request: TokenRequest, sizes: Sequence[int], cap: int
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_], IntArray, IntArray, IntArray]:
    tokens = request.tokens().astype(np.int64)
    q, m = candidates(tokens, sizes, cap)
    outcome = outcomes(tokens, q, m)
    # A completion's first token comes from prefill.
    spans = [(start + 1, end) for start, end in request.spans()]
    none = np.empty(0, np.int64)
    x = np.concatenate([none, *(np.arange(start, end) for start, end in spans)])
    remaining = np.concatenate([none, *(np.arange(end - start, 0, -1) for start, end in spans)])
    j = np.arange(MAX_K)
    room = x - q[x]
    places = q[x, None] + j % room[:, None]
    drafted = tokens[places]
    truth = tokens[np.minimum(x[:, None] + j, len(tokens) - 1)]
    agrees = (drafted == truth) & (j < remaining[:, None]) & (m[x] > 0)[:, None]
    right = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    return np.minimum(m[x, None] + j, 15), outcome[places], m[x] > 0, right, remaining, room


def candidates(
    tokens: IntArray, sizes: Sequence[int] = LADDER, cap: int = MAX_MATCH
) -> tuple[IntArray, IntArray]:
    """For each x the candidate (q, m) of tokens[:x], both [n]; q = m = 0 where there is none.

    ``sizes`` ascend, none more than twice the one before (of which the first follows 1).
    """
    n = len(tokens)
    x = np.arange(n)
    q = np.zeros(n, np.int64)
    ids, length = _numbered(tokens), 1
    for size in sizes:
        ids, length = _longer(ids, length, size), size
        end = np.concatenate([[-1], _previous(ids)])[:n]  # of the gram that ends at x - 1
        q = np.where(end >= 0, end + 1, q)
    m = np.zeros(n, np.int64)
    agrees = q > 0
    for before in range(1, min(cap, n - 1) + 1):
        agrees &= q >= before
        agrees &= tokens[q - before] == tokens[x - before]
        m += agrees
    return q, m


def outcomes(tokens: IntArray, q: IntArray, m: IntArray) -> IntArray:
    """The outcome byte of each token, [n]."""
    right = (m > 0) & (tokens[q] == tokens)
    return np.minimum(m, 15) * 2 + right


def _longer(ids: IntArray, length: int, size: int) -> IntArray:
    """From numbers of the grams of one length that end at each place to those of another, at most
    twice as long: such a gram is two of the shorter ones, which may overlap."""
    n = len(ids)
    shift = size - length
    pairs = n + np.arange(n)  # no gram of this size ends here: equal to none
    pairs[size - 1 :] = (ids[size - 1 - shift : n - shift] + 2) * 2 * n + ids[size - 1 :]
    return _numbered(pairs)


def _numbered(values: IntArray) -> IntArray:
    """Equal values to equal numbers below their count."""
    numbers: IntArray = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return numbers


def _previous(values: IntArray) -> IntArray:
    """[n], the previous place of the same value; -1 if there is none."""
    order = np.argsort(values, kind="stable")
    same = values[order[1:]] == values[order[:-1]]
    places = np.full(len(values), -1, np.int64)
    places[order[1:][same]] = order[:-1][same]
    return places
