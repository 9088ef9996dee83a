"""Reference of ``ngram_store_finish_``; the definition is in docs/ops/ngram_store_finish.md."""

from __future__ import annotations

from ngram_npu.reference.ngram_propose import Array
from ngram_npu.reference.ngram_store import opened


def ngram_store_finish_(store: Array, slot_indices: Array) -> None:
    """store [W] is written; slot_indices [N]; no results."""
    opened_store = opened(store) if len(slot_indices) else None
    if opened_store is None:
        return
    for slot in map(int, slot_indices):
        if 0 <= slot < opened_store.num_slots:
            opened_store.close(slot)
