"""Reference of ``ngram_index_reset_``: what it does shows in later steps alone."""

from __future__ import annotations

from ngram_npu.reference.ngram_propose import Array


def ngram_index_reset_(index: Array, slot_indices: Array) -> None:
    """index [W], slot_indices [N]; no results."""
