"""``ngram_store_finish_``: finish requests. Semantics: docs/ops/ngram_store_finish.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake


@with_empty_fake
def ngram_store_finish_(store: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """Makes the text of finished requests available to others and frees their slots.

    Args:
        store: [W] int32 on the CPU, made by :class:`ngram_npu.NgramStore`; written.
        slot_indices: [N] int32 or int64, finished in this order; those out of range are ignored.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_store_finish_(store, slot_indices)
