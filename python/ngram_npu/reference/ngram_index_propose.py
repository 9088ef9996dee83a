"""Reference of ``ngram_index_propose_``: the scan, whatever the index holds."""

from __future__ import annotations

from typing import Any

from ngram_npu.reference.ngram_propose import Array, ngram_propose


def ngram_index_propose_(
    token_ids: Array,
    num_tokens: Array,
    index: Array,
    row_indices: Array | None,
    slot_indices: Array | None,
    num_sampled: Array | None,
    *others: Any,
) -> tuple[Array, Array, Array]:
    """As ``ngram_propose``; index [W] is left alone: what is kept in it is an implementation's own
    affair."""
    return ngram_propose(token_ids, num_tokens, row_indices, num_sampled, *others)
