"""Drafts of recorded conversations at every place, from a ladder and from a store.

The ladder's are simulated. A recording contains all tokens of a row, so the candidate for each
token can be computed in advance, and with it the draft for any limit. That shares no code with the
kernels or with their reference (``tests/ops/reference/ladder.py``), and a test compares it with the
latter.

The store's are recorded from its kernel. The contents of a store at a place do not depend on
earlier drafts, since accepted text is always the recording's. So one pass over the conversations,
in order and token by token, gives the drafts for any table of costs and any limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import ngram_npu._C as _C
import numpy as np
import numpy.typing as npt
from ngram_npu.errors import InputError
from ngram_npu.store import NgramStore

from ngram_npu_cli.replay.simulation import TokenRequest

IntArray = npt.NDArray[Any]
CostsLike = IntArray | Callable[[IntArray, IntArray, IntArray, IntArray], IntArray]
"""A table by match and column, or the costs of any match, column, token, and token before it."""

LADDER = (1, 2, 4, 8, 16)
MAX_MATCH = 16
MAX_K = 16
STORE_SHAPE = (16, 56)
"""Of a table of costs."""


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
    """The N places of some completions at which a draft may be asked for, and the draft of at most
    `MAX_K` tokens there.

    Attributes:
        match: [N, K], min(m + j, 15): the table's row for the draft's token j.
        column: [N, K], the table's column for it.
        token: [N, K], the draft.
        before: [N, K], the token before each of the draft.
        length: [N], of the draft, 0 where nothing is found.
        right: [N], how many leading draft tokens agree with the recording.
        remaining: [N], tokens from this place to the completion's end.
    """

    match: IntArray
    column: IntArray
    token: IntArray
    before: IntArray
    length: IntArray
    right: IntArray
    remaining: IntArray

    def reached(self) -> npt.NDArray[np.bool_]:
        """[N, K], where a draft token meets the recording after none that was wrong."""
        last = np.minimum(self.right, np.minimum(self.length, self.remaining) - 1)
        found: npt.NDArray[np.bool_] = np.arange(MAX_K) <= last[:, None]
        return found

    def accepted(self) -> npt.NDArray[np.bool_]:
        """[N, K], where all draft tokens up to this one agree with the recording."""
        return np.arange(MAX_K) < self.right[:, None]

    def lengths(self, table: CostsLike, limit: int, k: int) -> IntArray:
        """[N], how many of k tokens are drafted with this table of costs and this limit."""
        of = tuple(a[:, :k] for a in (self.match, self.column, self.token, self.before))
        costs = table[of[0], of[1]] if isinstance(table, np.ndarray) else table(*of)
        has = np.arange(k) < self.length[:, None]
        lengths: IntArray = (has & (np.cumsum(costs, axis=1) <= limit)).sum(axis=1)
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


def at_equal_drafts(curve: Sequence[Counts], drafted_per_step: float) -> tuple[float, float]:
    """Tokens per step at which a curve drafts that much, linear between two of its points; and the
    position on the curve: the number of the point, and the fraction of the way to the next.

    Raises:
        InputError: The curve does not reach that far.
    """
    for i, (less, more) in enumerate(pairwise(curve)):
        low, high = less.drafted_per_step, more.drafted_per_step
        if low <= drafted_per_step < high:
            way = (drafted_per_step - low) / (high - low)
            gained = more.tokens_per_step - less.tokens_per_step
            return less.tokens_per_step + way * gained, i + way
    raise InputError(f"no limit drafts {drafted_per_step:.2f} tokens a step")


def _places(request: TokenRequest) -> tuple[IntArray, IntArray]:
    """Where the steps of a request may begin, and the tokens that remain of the completion. A
    completion's first token comes from prefill."""
    spans = [(start + 1, end) for start, end in request.spans()]
    none = np.empty(0, np.int64)
    at = np.concatenate([none, *(np.arange(start, end) for start, end in spans)])
    return at, np.concatenate([none, *(np.arange(end - start, 0, -1) for start, end in spans)])


def _right(
    tokens: IntArray, at: IntArray, remaining: IntArray, drafted: IntArray, length: IntArray
) -> IntArray:
    j = np.arange(MAX_K)
    truth = tokens[np.minimum(at[:, None] + j, len(tokens) - 1)]
    agrees = (drafted == truth) & (j < np.minimum(remaining, length)[:, None])
    right: IntArray = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    return right


def _joined(parts: Sequence[Walks]) -> Walks:
    columns = zip(*([getattr(part, f.name) for f in fields(Walks)] for part in parts), strict=True)
    return Walks(*(np.concatenate(list(column)) for column in columns))


def walks(requests: Sequence[TokenRequest], sizes: Sequence[int] = LADDER) -> Walks:
    """Of all completions of these conversations, in order, with a ladder's drafts."""
    return _joined([_walks_of(request, sizes) for request in requests])


def _walks_of(request: TokenRequest, sizes: Sequence[int]) -> Walks:
    tokens = request.tokens()
    q, m = candidates(tokens.astype(np.int64), sizes)
    outcome = outcomes(tokens, q, m)
    x, remaining = _places(request)
    places = q[x, None] + np.arange(MAX_K) % (x - q[x])[:, None]
    drafted, length = tokens[places], np.where(m[x] > 0, MAX_K, 0)
    return Walks(
        _small(np.minimum(m[x, None] + np.arange(MAX_K), 15)),
        _small(outcome[places]),
        drafted,
        tokens[places - 1],  # without a candidate any
        length,
        _right(tokens, x, remaining, drafted, length),
        remaining,
    )


def _small(cells: IntArray) -> Any:
    return cells.astype(np.int16)  # [N, K] of them take most of the memory


def candidates(tokens: IntArray, sizes: Sequence[int] = LADDER) -> tuple[IntArray, IntArray]:
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
    for before in range(1, min(MAX_MATCH, n - 1) + 1):
        agrees &= q >= before
        agrees &= tokens[q - before] == tokens[x - before]
        m += agrees
    return q, m


def outcomes(tokens: IntArray, q: IntArray, m: IntArray) -> IntArray:
    """The outcome byte of each token, [n]."""
    right = (m > 0) & (tokens[q] == tokens)
    found: IntArray = np.minimum(m, 15) * 2 + right
    return found


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


def record(requests: Sequence[TokenRequest], store: NgramStore) -> Walks:
    """Of all completions of these conversations, one after the other, with a store's drafts."""
    return _joined([_record(request, store.tensor) for request in requests])


def _record(request: TokenRequest, store: Any) -> Walks:
    tokens = request.tokens()
    at, remaining = _places(request)
    rows, columns = np.indices(STORE_SHAPE, np.uint8)
    match, column = (np.zeros((len(at), MAX_K), np.uint8) for _ in range(2))
    drafted, length = np.zeros((len(at), MAX_K), np.int32), np.zeros(len(at), np.int32)
    one, slot, nowhere = np.ones(1, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int32)
    for i, end in enumerate(at.astype(np.int32)):
        # Twice the same draft: its rows of the table, its columns. Only then the token is entered.
        for table, costs, where in ((rows, match, nowhere), (columns, column, slot)):
            length[i] = 0
            _C.ngram_store_step_(
                tokens[None],
                end[None],
                one,
                store,
                slot_indices=where,
                draft_token_ids=drafted[i : i + 1],
                num_draft_tokens=length[i : i + 1],
                match_len=np.empty(1, np.int32),
                draft_costs=costs[i : i + 1],
                costs=table,
                cost_limit=MAX_K * 255,
            )
    _C.ngram_store_finish_(store, slot)
    has = np.arange(MAX_K) < length[:, None]
    before = np.hstack([tokens[at - 1, None], drafted[:, :-1]])
    right = _right(tokens, at, remaining, drafted, length)
    match, column = (_small(np.where(has, of, 0)) for of in (match, column))
    return Walks(match, column, drafted, before, length, right, remaining)
