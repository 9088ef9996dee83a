"""Reference of ``compute_slot_mapping_``: docs/ops/compute_slot_mapping.md defines it."""

from __future__ import annotations

import numpy as np

from ngram_npu.reference.integers import wrap32
from ngram_npu.reference.ngram_propose import Array


def slot_of(
    position: int,
    blocks: list[int],
    block_size: int,
    blocks_per_kv_block: int,
    cp_world: int,
    cp_rank: int,
    cp_interleave: int,
) -> int | None:
    """Where the KV of ``position`` goes, by the request's block table; None: nowhere here."""
    if position < 0:
        return None
    virtual_block, offset = divmod(position, block_size * blocks_per_kv_block * cp_world)
    if offset // cp_interleave % cp_world != cp_rank:
        return None
    local = offset // (cp_world * cp_interleave) * cp_interleave + offset % cp_interleave
    index = virtual_block * blocks_per_kv_block + local // block_size
    if index >= len(blocks) or blocks[index] < 0:
        return None
    return blocks[index] * block_size + local % block_size


def compute_slot_mapping_(
    query_start_loc: Array,
    positions: Array,
    block_table: Array,
    slot_mapping: Array,
    row_indices: Array | None,
    block_size: int,
    blocks_per_kv_block: int,
    cp_world: int,
    cp_rank: int,
    cp_interleave: int,
    pad_id: int,
) -> None:
    """query_start_loc [B+1], positions [P] int64, block_table [R,NB], row_indices [B];
    slot_mapping, int32 or int64, is written."""
    num_tokens = len(slot_mapping)
    batch = len(query_start_loc) - 1
    for i in range(batch):
        row = i if row_indices is None else int(row_indices[i])
        blocks = [int(b) for b in block_table[row]] if 0 <= row < len(block_table) else []
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        for n in range(max(begin, 0), min(end, num_tokens)):
            slot = None
            if n < len(positions):
                slot = slot_of(
                    int(positions[n]),
                    blocks,
                    block_size,
                    blocks_per_kv_block,
                    cp_world,
                    cp_rank,
                    cp_interleave,
                )
            if slot is None:
                slot = pad_id
            slot_mapping[n] = wrap32(slot) if slot_mapping.dtype == np.int32 else slot
    slot_mapping[max(int(query_start_loc[batch]), 0) :] = pad_id
