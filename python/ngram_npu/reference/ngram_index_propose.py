"""Reference of ``ngram_index_propose_``: the scan, or a ladder's draft."""

from __future__ import annotations

from ngram_npu.reference.ladder import draft
from ngram_npu.reference.ngram_propose import (
    NOTHING,
    UNLIMITED,
    Array,
    Found,
    LookUp,
    new_drafts,
    propose,
    scan,
)


def lookup_of(
    min_n: int,
    max_n: int,
    k: int,
    match_policy: int,
    overlap: bool,
    max_len: int,
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    fill: bool,
    token_logits: Array | None = None,
) -> LookUp:
    """The lookup of the operators with an index: the scan's, or a ladder's."""
    if not ladder:
        return scan(min_n, max_n, k, match_policy, overlap, max_len, None, cost_limit, fill)
    table = [] if costs is None else costs.tolist()
    limit = None if costs is None else cost_limit

    def look_up(tokens: list[int]) -> Found:
        if k == 0 or max_len <= len(tokens):
            return NOTHING
        ids, paid, match = draft(tokens, k, table, limit, overlap, max_len, token_logits)
        shown = draft(tokens, k, [], None, overlap, UNLIMITED)[0] if fill else ids
        return Found(shown, len(ids), paid, match if ids else 0)

    return look_up


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
    ladder: bool,
    costs: Array | None,
    cost_limit: int,
    draft_costs: Array | None,
    fill: bool = False,
    token_logits: Array | None = None,
) -> tuple[Array, Array, Array]:
    """As ``ngram_propose``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    lookup = min_n, max_n, k, match_policy, overlap, max_len
    look_up = lookup_of(*lookup, ladder, costs, cost_limit, fill, token_logits)
    batch = len(token_ids if row_indices is None else row_indices)
    drafts = new_drafts(batch, k, draft_costs)
    propose(token_ids, num_tokens, row_indices, num_sampled, fill, look_up, drafts)
    return drafts[:3]
