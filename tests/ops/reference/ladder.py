"""The reference of drafts with a ladder of sizes: candidate, outcome bytes, and draft by cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SIZES = (16, 8, 4, 2, 1)
MAX_MATCH = 16


def candidate(tokens: list[int]) -> tuple[int, int]:
    """Returns (q, m): the place of the token expected next, and the number of tokens before it that
    agree with the row's end, at most `MAX_MATCH`; (0, 0) if the last token is new."""
    for size in SIZES:
        gram = tokens[len(tokens) - size :]
        for q in range(len(tokens) - 1, size - 1, -1):
            if tokens[q - size : q] == gram:
                m = size
                while m < min(MAX_MATCH, q) and tokens[q - m - 1] == tokens[-m - 1]:
                    m += 1
                return q, m
    return 0, 0


def outcome_bytes(tokens: list[int]) -> list[int]:
    """Returns a byte for each token: min(m, 15) * 2, plus 1 if the candidate of the tokens
    before it was right; 0 if there was no candidate."""
    outcomes = []
    for x, token in enumerate(tokens):
        q, m = candidate(tokens[:x])
        outcomes.append(min(m, 15) * 2 + (tokens[q] == token) if m else 0)
    return outcomes


def cost_of(cell: int, token_logits: Any, before: int, token: int) -> int:
    """Returns a token's cost: the table's cell, or with ``token_logits`` that of a sum of
    logits."""
    if token_logits is None:
        return cell
    logit = cell + int(token_logits[token % 4096, 0]) + int(token_logits[before % 4096, 1])
    wrapped = (logit + 1024) % 2048 - 1024
    return min(255, round(16 * math.log2(1 + math.exp(-wrapped / 32))))


def draft(
    tokens: list[int],
    k: int,
    costs: Sequence[Sequence[int]],
    limit: int | None,
    overlap: bool,
    max_len: int,
    token_logits: Any = None,
) -> tuple[list[int], list[int], int]:
    """Returns the row's draft of at most k tokens, the cost of each, and m; ([], [], m) without
    one.

    Costs are in sixteenths of a bit; ``costs`` is 16 x 32, by match length and outcome byte. A
    draft ends before the sum would exceed ``limit``. Without a limit it has k tokens of cost 0.
    With ``token_logits`` (4096 x 2), ``costs`` contains logits.
    """
    q, m = candidate(tokens)
    if not m:
        return [], [], 0
    outcomes = [] if limit is None else outcome_bytes(tokens)
    ids: list[int] = []
    token_costs: list[int] = []
    for j in range(min(k, max_len - len(tokens))):
        if q + j >= len(tokens) and not overlap:
            break
        place = q + j % (len(tokens) - q)
        cost = 0
        if limit is not None:
            cell = int(costs[min(m + j, 15)][outcomes[place]])
            cost = cost_of(cell, token_logits, (ids or tokens)[-1], tokens[place])
        if limit is not None and sum(token_costs) + cost > limit:
            break
        ids.append(tokens[place])
        token_costs.append(cost)
    return ids, token_costs, m
