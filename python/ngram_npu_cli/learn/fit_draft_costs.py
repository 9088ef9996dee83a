"""Fits costs of draft tokens on recorded traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from ngram_npu.config import default_costs, default_store_costs
from ngram_npu.draft_costs import (
    RANGES,
    SHAPES,
    TOKEN_CLASSES,
    UNITS_PER_NAT,
    Costs,
    FloatArray,
    IntArray,
    costs_to_logits,
)
from ngram_npu.store import NgramStore

from ngram_npu_cli.logs.conversations import TokenRequest
from ngram_npu_cli.replay.walks import PositionDrafts, record_store, simulate_ladder

__all__ = ["Costs", "costs_to_logits", "fit"]

MAX_TOKENS = 1 << 20
"""Maximum number of completion tokens to fit on; they take 200 MB of memory."""
PRIOR_WEIGHT = 20.0
"""Weight of the priors, as a number of observations. The prior of a cell is its shipped cost, that
of a token is 0."""
ROUNDS = 12
"""Number of times that Newton's method is applied to all tables."""


def fit(conversations: Sequence[TokenRequest], tokenizer: str = "") -> Costs:
    """Fits costs on all drafts of a ladder and of a store, at every position of every completion,
    up to the first wrong token of each draft.

    A logit is the sum of a table's cell and of two tokens' logits. The fit maximizes the likelihood
    with priors: the shipped costs for cells, and 0 for tokens. It is deterministic.

    Args:
        conversations: Oldest first. If they have more than ``MAX_TOKENS`` tokens, only the newest
            conversations are used.
        tokenizer: 32 hex digits (``ngram_npu.store.tokenizer_digest``).
    """
    table_entries, is_right = observe_drafts(list(_select_newest(conversations)))
    shipped = np.concatenate([default_costs().ravel(), default_store_costs().ravel()])
    cells, *tokens = _maximize_likelihood(table_entries, is_right, costs_to_logits(shipped))
    row, store = np.split(_round_logits(cells, "row"), [default_costs().size])
    token_table = np.stack([_round_logits(logits, "tokens") for logits in tokens], axis=1)
    return Costs(row.reshape(SHAPES["row"]), store.reshape(SHAPES["store"]), token_table, tokenizer)


def _select_newest(conversations: Sequence[TokenRequest]) -> Iterator[TokenRequest]:
    budget, first = MAX_TOKENS, len(conversations)
    while first > 0 and budget > 0:
        first -= 1
        budget -= sum(end - start for start, end in conversations[first].spans())
    return iter(conversations[first:])


def observe_drafts(conversations: Sequence[TokenRequest]) -> tuple[list[IntArray], FloatArray]:
    """Returns observations of all draft tokens that a step would have verified.

    Returns:
        Three arrays [N]: the token's cell, its class, and the class of the token before it; and
        [N], whether the token was right. The cells of the store's table are numbered after those of
        the row's table.
    """
    tokens = sum(request.num_tokens for request in conversations)
    store = NgramStore(1, max(4096, 2 * tokens))
    num_row_cells = SHAPES["row"][0] * SHAPES["row"][1]
    parts: list[tuple[IntArray, ...]] = [(np.empty(0, np.int64),) * 4]
    for request in conversations:
        parts.append(_flatten(simulate_ladder([request]), 0, SHAPES["row"][1]))
        parts.append(_flatten(record_store(request, store), num_row_cells, SHAPES["store"][1]))
    *table_entries, is_right = (np.concatenate(list(column)) for column in zip(*parts, strict=True))
    return table_entries, is_right.astype(np.float64)


def _flatten(drafts: PositionDrafts, first_cell: int, columns: int) -> tuple[IntArray, ...]:
    reached = drafts.find_reached()
    return (
        first_cell + drafts.match[reached] * columns + drafts.column[reached],
        (drafts.token[reached] % TOKEN_CLASSES).astype(np.int16),
        (drafts.previous_token[reached] % TOKEN_CLASSES).astype(np.int16),
        drafts.find_accepted()[reached],
    )


def _maximize_likelihood(
    table_entries: Sequence[IntArray], is_right: FloatArray, start: FloatArray
) -> list[FloatArray]:
    """Applies Newton's method to one table after the other, to each entry of a table separately."""
    tables = [start.copy(), np.zeros(TOKEN_CLASSES), np.zeros(TOKEN_CLASSES)]
    logits = start[table_entries[0]]
    for _ in range(ROUNDS):
        for table, entries, prior in zip(tables, table_entries, (start, 0.0, 0.0), strict=True):
            probability = 1 / (1 + np.exp(-logits))
            errors = np.bincount(entries, is_right - probability, len(table))
            gradient = errors - PRIOR_WEIGHT * (table - prior)
            variance = probability * (1 - probability)
            curvature = np.bincount(entries, variance, len(table)) + PRIOR_WEIGHT
            step = np.clip(gradient / curvature, -1, 1)
            table += step
            logits += step[entries]
    return tables


def _round_logits(nats: FloatArray, table: str) -> IntArray:
    costs: IntArray = np.clip(np.rint(nats * UNITS_PER_NAT), *RANGES[table]).astype(np.int64)
    return costs
