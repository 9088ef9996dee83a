"""Drafts of recorded conversations at every place, from a ladder and from a store.

The ladder's are simulated. A recording contains all tokens of a row, so the candidate for each
token can be computed in advance, and with it the draft for any limit. That shares no code with the
kernels or with their reference (``ngram_npu.reference.ladder``), and a test compares it with the
latter.

The store's are recorded from its kernel. The contents of a store at a place do not depend on
earlier drafts, since accepted text is always the recording's. So one pass over the conversations,
in order and token by token, gives the drafts for any table of costs and any limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ngram_npu import _C, NgramStore
from ngram_npu.replay import ReplayError, TokenRequest, load_inputs, load_tokenizer, tokenize

IntArray = npt.NDArray[np.int64]

PARTS = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "all": slice(None)}
"""Halves of a set's conversations, whose first has number 0."""
LADDER = (1, 2, 4, 8, 16)
MAX_MATCH = 16
MAX_K = 16
STORE_SHAPE = (16, 56)
"""Of a table of costs."""
BINS = 10
"""Of the calibration."""


@dataclass(frozen=True)
class Recorded:
    """Sets by name, and the tokenizer that made their token ids, for the record."""

    sets: dict[str, list[TokenRequest]]
    tokenizer: str


def load(paths: Sequence[Path], tokenizer: str) -> Recorded:
    """Read files of conversations and folders of them; `tokenizer` is as for `load_tokenizer`.

    Raises:
        ReplayError: something cannot be read, or generates nothing in more than one step.
    """
    loaded = load_tokenizer(tokenizer)
    sets = {item.name: tokenize(item, loaded) for item in load_inputs(paths)}
    for name, requests in sets.items():
        if not any(request.spans() for request in requests):
            raise ReplayError(f"{name}: no completion of two tokens or more")
    return Recorded(sets, f"{loaded.name}: {loaded.source}")


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
    """

    match: IntArray
    outcome: IntArray
    found: npt.NDArray[np.bool_]
    right: IntArray
    remaining: IntArray

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


def walks(requests: Sequence[TokenRequest], sizes: Sequence[int] = LADDER) -> Walks:
    """The walks of all completions of these conversations, in order."""
    parts = [_walks_of(request, sizes) for request in requests]
    columns = zip(*parts, strict=True)
    return Walks(*(np.concatenate(list(column)) for column in columns))


def _walks_of(
    request: TokenRequest, sizes: Sequence[int]
) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_], IntArray, IntArray]:
    tokens = request.tokens().astype(np.int64)
    q, m = candidates(tokens, sizes)
    outcome = outcomes(tokens, q, m)
    # A completion's first token comes from prefill.
    spans = [(start + 1, end) for start, end in request.spans()]
    none = np.empty(0, np.int64)
    x = np.concatenate([none, *(np.arange(start, end) for start, end in spans)])
    remaining = np.concatenate([none, *(np.arange(end - start, 0, -1) for start, end in spans)])
    j = np.arange(MAX_K)
    places = q[x, None] + j % (x - q[x])[:, None]
    drafted = tokens[places]
    truth = tokens[np.minimum(x[:, None] + j, len(tokens) - 1)]
    agrees = (drafted == truth) & (j < remaining[:, None]) & (m[x] > 0)[:, None]
    right = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    return np.minimum(m[x, None] + j, 15), outcome[places], m[x] > 0, right, remaining


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


@dataclass(frozen=True)
class StoreWalks:
    """The N places of some completions, and the store's draft of at most `MAX_K` tokens there.

    Attributes:
        match: [N, K], the table's row for the draft's token j.
        column: [N, K], the table's column for it.
        length: [N], tokens that the store has there, 0 without a hit.
        right: [N], how many leading draft tokens agree with the recording.
    """

    match: IntArray
    column: IntArray
    length: IntArray
    right: IntArray


def record(requests: Sequence[TokenRequest], make_store: Callable[[], NgramStore]) -> StoreWalks:
    """Of all completions of these conversations, one after the other, and of one store."""
    stores = [make_store(), make_store()]
    tables = [np.empty(STORE_SHAPE, np.uint8) for _ in stores]
    tables[0][:] = np.arange(STORE_SHAPE[0])[:, None]
    tables[1][:] = np.arange(STORE_SHAPE[1])
    outs = [
        {
            "draft_token_ids": np.empty((1, MAX_K), np.int32),
            "num_draft_tokens": np.empty(1, np.int32),
            "match_len": np.empty(1, np.int32),
            "draft_costs": np.empty((1, MAX_K), np.uint8),
        }
        for _ in stores
    ]
    places = sum(end - start - 1 for request in requests for start, end in request.spans())
    match, column, drafted = (np.zeros((places, MAX_K), np.int64) for _ in range(3))
    length, right = np.zeros(places, np.int64), np.zeros(places, np.int64)
    one, slot = np.ones(1, np.int32), np.zeros(1, np.int32)
    at = 0
    for request in requests:
        tokens = request.tokens()
        row = tokens[None]
        for start, end in request.spans():
            first = at
            for x in range(start + 1, end):
                for store, table, out in zip(stores, tables, outs, strict=True):
                    out["num_draft_tokens"][0] = 0
                    _C.ngram_store_step_(
                        row,
                        np.array([x], np.int32),
                        one,
                        store.tensor,
                        costs=table,
                        cost_limit=1 << 20,
                        **out,
                    )
                length[at] = outs[0]["num_draft_tokens"][0]
                match[at] = outs[0]["draft_costs"]
                column[at] = outs[1]["draft_costs"]
                drafted[at] = outs[0]["draft_token_ids"]
                at += 1
            x = np.arange(start + 1, end)
            j = np.arange(MAX_K)
            truth = tokens[np.minimum(x[:, None] + j, len(tokens) - 1)]
            agrees = (drafted[first:at] == truth) & (j < (end - x)[:, None])
            agrees &= j < length[first:at, None]
            right[first:at] = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
        for store in stores:
            _C.ngram_store_finish_(store.tensor, slot)
    none = np.arange(MAX_K) >= length[:, None]
    match[none] = column[none] = 0
    return StoreWalks(match, column, length, right)


def calibration(found: Walks, costs: IntArray, limit: int, k: int) -> dict[str, Any]:
    """Predicted against actual acceptance in a replay of drafts by this table and limit.

    ``token``: of a drafted token, where those before it were accepted (2 ** (-cost / 16)).
    ``run``: of a drafted token and all before it (2 ** (-sum of costs / 16)). Tokens drafted past
    a completion's end are left out: nobody knows what they would have met.
    """
    lengths = found.lengths(costs, limit, k)
    places = found.steps(lengths)
    j = np.arange(k)
    drafted = j < np.minimum(lengths, found.remaining)[places, None]
    right = j < found.right[places, None]
    paid = costs[found.match[places, :k], found.outcome[places, :k]]
    met = drafted & found.reached()[places, :k]
    return {
        "token": _binned(paid[met], right[met]),
        "run": _binned(np.cumsum(paid, axis=1)[drafted], right[drafted]),
    }


def _binned(costs: IntArray, right: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Bins of equal width over the predicted probability; the expected calibration error is the
    mean over all tokens of their bin's |predicted - accepted|."""
    predicted = 2.0 ** (-costs / 16)
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    number = np.bincount(bins, minlength=BINS)
    sums = [np.bincount(bins, weights=of, minlength=BINS) for of in (predicted, right)]
    used = number > 0
    expected, actual = (of[used] / number[used] for of in sums)
    error = float((abs(expected - actual) * number[used]).sum() / number.sum())
    return {
        "tokens": int(number.sum()),
        "expected_calibration_error": round(error, 4),
        "predicted": expected.round(4).tolist(),
        "accepted": actual.round(4).tolist(),
        "bin_tokens": number[used].tolist(),
    }
