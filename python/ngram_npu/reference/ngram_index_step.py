"""Reference of ``ngram_index_step_``: the rescan, whatever the index holds."""

from __future__ import annotations

from typing import Any

from ngram_npu.reference.ngram_propose import Array
from ngram_npu.reference.ngram_step import ngram_step_


def ngram_index_step_(
    token_ids: Array,
    num_tokens: Array,
    sampled_token_ids: Array,
    index: Array,
    discard: Array | None,
    row_indices: Array | None,
    slot_indices: Array | None,
    *others: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """As ``ngram_step_``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    return ngram_step_(token_ids, num_tokens, sampled_token_ids, discard, row_indices, *others)
