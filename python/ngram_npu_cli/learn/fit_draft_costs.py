"""Costs of draft tokens fitted on one's own traffic, and what they bring: for learn and users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.draft_costs import (
    CLASSES,
    RANGES,
    SHAPES,
    UNIT,
    Costs,
    FloatArray,
    IntArray,
    costs_of,
    logits_of,
)
from ngram_npu.errors import InputError
from ngram_npu.store import NgramStore

from ngram_npu_cli.replay import TokenRequest
from ngram_npu_cli.replay.walks import Walks, at_equal_drafts, record, walks

__all__ = ["Comparison", "Costs", "compare", "costs_of", "fit", "logits_of"]

MOST_TOKENS = 1 << 20
"""Of completions that are fitted on: the newest; 200 MB of memory."""
STRENGTH = {"cells": 20.0, "tokens": 20.0}
"""Observations' worth of belief in the shipped costs, and in a token that says nothing."""
ROUNDS = 12


@dataclass(frozen=True)
class Comparison:
    """What fitted costs bring on conversations that they were not fitted on, without a store."""

    conversations: int
    """Measured on."""
    shipped: float
    """Tokens per step with the package's costs."""
    fitted: float
    """The same with the fitted ones, where they draft as many tokens per step."""

    @property
    def gain(self) -> float:
        return self.fitted / self.shipped

    @property
    def wins(self) -> bool:
        """Whether fitted costs are recommended."""
        return self.gain > 1


def compare(conversations: Sequence[TokenRequest], k: int = 8, limit: int = 40) -> Comparison:
    """Fits on every second conversation and measures on the others.

    Args:
        k: draft tokens per step, at most 16.
        limit: the shipped costs' limit, which says how much is drafted.

    Raises:
        ngram_npu_cli.replay.InputError: too few conversations, or none with a completion.
    """

    used = [request for request in conversations if request.spans()]
    if len(used) < 2:
        raise InputError("costs: expected two conversations with completions or more, got fewer")
    fitted, measured = fit(used[::2]), list(_newest(used[1::2]))
    found = walks(measured)
    shipped = found.replay(found.lengths(default_costs().astype(np.int64), limit, k))
    curve = [found.replay(found.lengths(fitted.of_row, at, k)) for at in (*range(0, 160, 2), 4080)]
    if shipped.drafted in (curve[0].drafted, curve[-1].drafted):  # nothing to choose from
        return Comparison(len(measured), shipped.tokens_per_step, shipped.tokens_per_step)
    tokens, _ = at_equal_drafts(curve, shipped.drafted_per_step)
    return Comparison(len(measured), shipped.tokens_per_step, tokens)


def fit(conversations: Sequence[TokenRequest], tokenizer: str = "") -> Costs:
    """Costs fitted on conversations, oldest first: all drafts of a ladder and of a store at every
    place of every completion, up to their first wrong token.

    A logit is the sum of a table's cell and of two tokens' logits. Each is as likely as possible,
    where cells are drawn to the shipped costs and tokens to 0. The same conversations give the same
    costs.

    Args:
        conversations: if they have more than ``MOST_TOKENS`` tokens, the newest of them.
        tokenizer: 32 hex digits (``ngram_npu.tokenizer_digest.digest_of``).
    """

    places, right = observed(list(_newest(conversations)))
    shipped = np.concatenate([default_costs().ravel(), default_store_costs().ravel()])
    cells, *tokens = _likeliest(places, right, logits_of(shipped))
    row, store = np.split(_whole(cells, "row"), [default_costs().size])
    pair = np.stack([_whole(of, "tokens") for of in tokens], axis=1)
    return Costs(row.reshape(SHAPES["row"]), store.reshape(SHAPES["store"]), pair, tokenizer)


def _newest(conversations: Sequence[TokenRequest]) -> Iterator[TokenRequest]:
    left, first = MOST_TOKENS, len(conversations)
    while first > 0 and left > 0:
        first -= 1
        left -= sum(end - start for start, end in conversations[first].spans())
    return iter(conversations[first:])


def observed(conversations: Sequence[TokenRequest]) -> tuple[list[IntArray], FloatArray]:
    """Of each draft token that was reached its cell (those of the store's table behind the row's),
    its class and that of the token before it; and whether it was right."""

    tokens = sum(request.num_tokens for request in conversations)
    store = NgramStore(1, max(4096, 2 * tokens))
    found: list[tuple[IntArray, ...]] = [(np.empty(0, np.int64),) * 4]
    for request in conversations:
        found.append(_flat(walks([request]), 0, SHAPES["row"][1]))
        drafts = record([request], store)
        found.append(_flat(drafts, SHAPES["row"][0] * SHAPES["row"][1], SHAPES["store"][1]))
    *places, right = (np.concatenate(list(of)) for of in zip(*found, strict=True))
    return places, right.astype(np.float64)


def _flat(found: Walks, first: int, columns: int) -> tuple[IntArray, ...]:
    met = found.reached()
    return (
        first + found.match[met] * columns + found.column[met],
        (found.token[met] % CLASSES).astype(np.int16),
        (found.before[met] % CLASSES).astype(np.int16),
        found.accepted()[met],
    )


def _likeliest(
    places: Sequence[IntArray], right: FloatArray, start: FloatArray
) -> list[FloatArray]:
    """Newton's steps, one table after the other, each entry of a table by itself."""
    tables = [start.copy(), np.zeros(CLASSES), np.zeros(CLASSES)]
    strengths = STRENGTH["cells"], STRENGTH["tokens"], STRENGTH["tokens"]
    logits = start[places[0]]
    for _ in range(ROUNDS):
        for table, at, strength, centre in zip(
            tables, places, strengths, (start, 0.0, 0.0), strict=True
        ):
            rate = 1 / (1 + np.exp(-logits))
            pull = np.bincount(at, right - rate, len(table)) - strength * (table - centre)
            curvature = np.bincount(at, rate * (1 - rate), len(table)) + strength
            step = np.clip(pull / curvature, -1, 1)
            table += step
            logits += step[at]
    return tables


def _whole(nats: FloatArray, table: str) -> IntArray:
    found: IntArray = np.clip(np.rint(nats * UNIT), *RANGES[table]).astype(np.int64)
    return found
