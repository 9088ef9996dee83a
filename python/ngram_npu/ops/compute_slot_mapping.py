"""``compute_slot_mapping_``: the KV cache slot of each token. Semantics:
docs/ops/compute_slot_mapping.md."""

from __future__ import annotations

import torch

from ngram_npu.ops._register import with_empty_fake

PAD_SLOT_ID = -1
"""vLLM's slot of a token whose KV is not stored."""


@with_empty_fake
def compute_slot_mapping_(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    row_indices: torch.Tensor | None = None,
    block_size: int,
    blocks_per_kv_block: int = 1,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    pad_id: int = PAD_SLOT_ID,
) -> None:
    """Writes the KV slot of every token, and ``pad_id`` where it has none on this rank.

    Args:
        query_start_loc: [B + 1] int32, where each request's tokens start in the flat batch.
        positions: [P] int64, each token's position in its request.
        block_table: [R, NB] int32, inner stride 1.
        slot_mapping: [any size] int32 or int64; written.
        row_indices: [B] int32 or int64, batch position -> row; None: row i = i, B <= R.
        block_size: tokens in a block of the table.
        blocks_per_kv_block: blocks of the table in one block of the KV cache manager.
        cp_world, cp_rank: number of context-parallel ranks that share the positions, and this rank.
        cp_interleave: number of consecutive positions that stay on one rank.
        pad_id: value for tokens without a slot and for the end of ``slot_mapping``.

    Raises:
        ValueError: a wrong argument (dtype, device, shape, stride, range, overlapping memory),
            before anything is written.
    """
    torch.ops.ngram_npu.compute_slot_mapping_(
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        row_indices=row_indices,
        block_size=block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
        pad_id=pad_id,
    )
