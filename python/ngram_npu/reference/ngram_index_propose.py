"""Reference of ``ngram_index_propose_``: the scan, or a ladder's draft."""

from __future__ import annotations

from collections.abc import Callable

from ngram_npu.reference.ladder import draft
from ngram_npu.reference.ngram_propose import Array, draft_for, draft_rows

NO_COST = 255


def drafter(
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    draft_costs: Array | None,
) -> Callable[[int, list[int]], tuple[list[int], int]]:
    """What drafts for a batch position and its row. draft_costs [B,k] uint8 is written."""
    if draft_costs is not None:
        draft_costs[:] = NO_COST

    def draft_of(i: int, tokens: list[int]) -> tuple[list[int], int]:
        if not ladder:
            return draft_for(tokens, min_n, max_n, k, match_policy, overlap, max_len)
        table = [] if costs is None else costs.tolist()
        limit = None if costs is None else cost_limit
        ids, paid, match = draft(tokens, k, table, limit, overlap, max_len)
        if draft_costs is not None:
            draft_costs[i, : len(paid)] = paid
        return ids, match if ids else 0

    return draft_of


def ngram_index_propose_(
    token_ids: Array,
    num_tokens: Array,
    index: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    num_sampled: Array | None,
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    workspace: Array | None,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    draft_costs: Array | None,
    fill: bool = False,
) -> tuple[Array, Array, Array]:
    """As ``ngram_propose``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    lookup = (min_n, max_n, k, match_policy, overlap, max_len)
    draft_of = drafter(*lookup, ladder, costs, cost_limit, draft_costs)
    return draft_rows(token_ids, num_tokens, row_indices, num_sampled, k, fill, draft_of)
