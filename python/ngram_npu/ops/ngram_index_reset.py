"""``ngram_index_reset_``: empty slots. Semantics: docs/ops/ngram_index_reset.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake


@with_empty_fake
def ngram_index_reset_(index: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """Empties slots and returns their memory to the index.

    Args:
        index: [W] int32, on the CPU, made by :class:`ngram_npu.NgramIndex`; written.
        slot_indices: [N] int32 or int64; those out of range are ignored.

    Raises:
        ValueError: a wrong argument, before anything is written.
    """
    torch.ops.ngram_npu.ngram_index_reset_(index, slot_indices)
