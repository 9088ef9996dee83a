"""Reference of ``ngram_index_step_``: the rescan, or a ladder's draft."""

from __future__ import annotations

from ngram_npu.reference.ngram_index_propose import lookup_of
from ngram_npu.reference.ngram_propose import Array
from ngram_npu.reference.ngram_step import append_and_draft


def ngram_index_step_(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    index: Array,
    discard: Array | None,
    row_indices: Array | None,
    slot_indices: Array | None,
    advance: bool,
    vocab_size: int,
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
) -> tuple[Array, Array, Array, Array, Array]:
    """As ``ngram_step_``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    lookup = min_n, max_n, k, match_policy, overlap, max_len
    look_up = lookup_of(*lookup, ladder, costs, cost_limit, fill, token_logits)
    appended = token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size
    return append_and_draft(*appended, k, fill, look_up, draft_costs)
