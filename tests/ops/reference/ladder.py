"""Reference of drafts from an index with a ladder: the candidate, the outcome bytes, and the
draft by cost. The definition is in docs/ops/ngram_index_propose.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SIZES = (16, 8, 4, 2, 1)
MAX_MATCH = 16


def find_candidate(tokens: list[int]) -> tuple[int, int]:
    """Returns the position of the token that is expected next, and the number of tokens before
    this position that agree with the row's end, at most `MAX_MATCH`; (0, 0) if the last token is
    new. The document calls these numbers q and m."""
    for size in SIZES:
        ngram = tokens[len(tokens) - size :]
        for pos in range(len(tokens) - 1, size - 1, -1):
            if tokens[pos - size : pos] == ngram:
                length = size
                max_length = min(MAX_MATCH, pos)
                while length < max_length and tokens[pos - length - 1] == tokens[-length - 1]:
                    length += 1
                return pos, length
    return 0, 0


def compute_outcome_bytes(tokens: list[int]) -> list[int]:
    """Returns a byte for each token: min(match length, 15) * 2, plus 1 if the candidate of the
    tokens before the token predicted the token; 0 if there was no candidate."""
    outcomes = []
    for i, token in enumerate(tokens):
        candidate, match_len = find_candidate(tokens[:i])
        is_correct = tokens[candidate] == token
        outcomes.append(min(match_len, 15) * 2 + is_correct if match_len else 0)
    return outcomes


def compute_cost(table_value: int, token_logits: Any, previous_token: int, token: int) -> int:
    """Returns a token's cost. Without ``token_logits``, this is the value in the table of costs.
    With ``token_logits``, the table contains logits, and the cost is that of the sum of the
    logits."""
    if token_logits is None:
        return table_value
    logit = table_value + int(token_logits[token % 4096, 0])
    logit += int(token_logits[previous_token % 4096, 1])
    wrapped = (logit + 1024) % 2048 - 1024
    return min(255, round(16 * math.log2(1 + math.exp(-wrapped / 32))))


def make_ladder_draft(
    tokens: list[int],
    k: int,
    costs: Sequence[Sequence[int]],
    limit: int | None,
    overlap: bool,
    max_len: int,
    token_logits: Any = None,
) -> tuple[list[int], list[int], int]:
    """Returns the row's draft of at most k tokens, the cost of each token, and the match length.

    Costs are in sixteenths of a bit; ``costs`` is 16 x 32, by match length and outcome byte. The
    draft ends before the sum of its costs would exceed ``limit``. Without a limit, the draft has k
    tokens of cost 0. With ``token_logits`` (4096 x 2), ``costs`` contains logits.
    """
    candidate, match_len = find_candidate(tokens)
    if not match_len:
        return [], [], 0
    outcomes = [] if limit is None else compute_outcome_bytes(tokens)
    ids: list[int] = []
    token_costs: list[int] = []
    for j in range(min(k, max_len - len(tokens))):
        if candidate + j >= len(tokens) and not overlap:
            break
        position = candidate + j % (len(tokens) - candidate)
        cost = 0
        if limit is not None:
            table_value = int(costs[min(match_len + j, 15)][outcomes[position]])
            cost = compute_cost(table_value, token_logits, (ids or tokens)[-1], tokens[position])
        if limit is not None and sum(token_costs) + cost > limit:
            break
        ids.append(tokens[position])
        token_costs.append(cost)
    return ids, token_costs, match_len
