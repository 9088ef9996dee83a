"""Reference of ``ngram_index_append_``: what it does shows in later steps alone."""

from __future__ import annotations

from ngram_npu.reference.ngram_propose import Array


def ngram_index_append_(
    token_ids: Array,
    num_tokens: Array,
    index: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    min_n: int,
    max_n: int,
    match_policy: int,
    ladder: bool,
    outcomes: bool,
) -> None:
    """token_ids [R,S], num_tokens [R], row_indices and slot_indices [B], index [W]; no results."""
