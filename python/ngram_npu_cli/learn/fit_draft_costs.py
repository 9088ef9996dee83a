"""Fits costs of draft tokens on recorded traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    costs_to_logits,
)
from ngram_npu.store import NgramStore

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.replay.walks import Walks, record, walks

__all__ = ["Costs", "costs_to_logits", "fit"]

MAX_TOKENS = 1 << 20
"""Maximum number of completion tokens to fit on; they take 200 MB of memory."""
STRENGTH = 20.0
"""Weight of the priors, in observations: the shipped cost of a cell, and 0 for a token."""
ROUNDS = 12


def fit(conversations: Sequence[TokenRequest], tokenizer: str = "") -> Costs:
    """Fits costs on all drafts of a ladder and of a store, at every position of every completion,
    up to the first wrong token of each draft.

    A logit is the sum of a table's cell and of two tokens' logits. The fit maximizes the likelihood
    with priors: the shipped costs for cells, and 0 for tokens. It is deterministic.

    Args:
        conversations: Oldest first. If they have more than ``MAX_TOKENS`` tokens, the newest ones
            are used.
        tokenizer: 32 hex digits (``ngram_npu.store.tokenizer_digest``).
    """
    places, right = observed(list(_select_newest(conversations)))
    shipped = np.concatenate([default_costs().ravel(), default_store_costs().ravel()])
    cells, *tokens = _maximize_likelihood(places, right, costs_to_logits(shipped))
    row, store = np.split(_round(cells, "row"), [default_costs().size])
    pair = np.stack([_round(logits, "tokens") for logits in tokens], axis=1)
    return Costs(row.reshape(SHAPES["row"]), store.reshape(SHAPES["store"]), pair, tokenizer)


def _select_newest(conversations: Sequence[TokenRequest]) -> Iterator[TokenRequest]:
    budget, first = MAX_TOKENS, len(conversations)
    while first > 0 and budget > 0:
        first -= 1
        budget -= sum(end - start for start, end in conversations[first].spans())
    return iter(conversations[first:])


def observed(conversations: Sequence[TokenRequest]) -> tuple[list[IntArray], FloatArray]:
    """Returns observations of all draft tokens that a step would have verified.

    Returns:
        [cell, class, class of the previous token], each [N], and [N], whether the token was right.
        The cells of the store's table follow those of the row's table.
    """
    tokens = sum(request.num_tokens for request in conversations)
    store = NgramStore(1, max(4096, 2 * tokens))
    num_row_cells = SHAPES["row"][0] * SHAPES["row"][1]
    parts: list[tuple[IntArray, ...]] = [(np.empty(0, np.int64),) * 4]
    for request in conversations:
        parts.append(_flatten(walks([request]), 0, SHAPES["row"][1]))
        parts.append(_flatten(record([request], store), num_row_cells, SHAPES["store"][1]))
    *places, right = (np.concatenate(list(column)) for column in zip(*parts, strict=True))
    return places, right.astype(np.float64)


def _flatten(drafts: Walks, first_cell: int, columns: int) -> tuple[IntArray, ...]:
    reached = drafts.reached()
    return (
        first_cell + drafts.match[reached] * columns + drafts.column[reached],
        (drafts.token[reached] % CLASSES).astype(np.int16),
        (drafts.before[reached] % CLASSES).astype(np.int16),
        drafts.accepted()[reached],
    )


def _maximize_likelihood(
    places: Sequence[IntArray], right: FloatArray, start: FloatArray
) -> list[FloatArray]:
    """Applies Newton's method to one table after the other, for each entry separately."""
    tables = [start.copy(), np.zeros(CLASSES), np.zeros(CLASSES)]
    logits = start[places[0]]
    for _ in range(ROUNDS):
        for table, entries, prior in zip(tables, places, (start, 0.0, 0.0), strict=True):
            rate = 1 / (1 + np.exp(-logits))
            pull = np.bincount(entries, right - rate, len(table)) - STRENGTH * (table - prior)
            curvature = np.bincount(entries, rate * (1 - rate), len(table)) + STRENGTH
            step = np.clip(pull / curvature, -1, 1)
            table += step
            logits += step[entries]
    return tables


def _round(nats: FloatArray, table: str) -> IntArray:
    costs: IntArray = np.clip(np.rint(nats * UNIT), *RANGES[table]).astype(np.int64)
    return costs
