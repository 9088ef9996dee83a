"""The reference of the state correction of asynchronous scheduling: docs/ops."""

from __future__ import annotations

import numpy as np
from ops.reference.bookkeeping import Array, wrap32

__all__ = [
    "compute_slot_mapping_",
    "correct_num_computed_tokens_",
    "correct_spec_state_",
]


def correct_num_computed_tokens_(
    num_computed_tokens: Array,
    num_accepted_tokens: Array,
    prev_positions: Array,
    num_sampled_prev: Array,
    num_draft_prev: Array,
    host_num_computed_tokens: Array,
) -> None:
    """num_computed_tokens [N] and num_accepted_tokens [at least B] are written; prev_positions and
    host_num_computed_tokens [B]; num_sampled_prev and num_draft_prev of any length."""
    old = num_computed_tokens.copy()
    previous = min(len(old), len(num_sampled_prev), len(num_draft_prev))
    for i in range(len(prev_positions)):
        p = int(prev_positions[i])
        if 0 <= p < previous and num_draft_prev[p] > 0:
            sampled = min(int(num_sampled_prev[p]), int(num_draft_prev[p]) + 1)
            num_computed_tokens[i] = wrap32(int(old[p]) + sampled)
            num_accepted_tokens[i] = sampled
        else:
            num_computed_tokens[i] = host_num_computed_tokens[i]


def slot_of(
    position: int,
    blocks: list[int],
    block_size: int,
    blocks_per_kv_block: int,
    cp_world: int,
    cp_rank: int,
    cp_interleave: int,
) -> int | None:
    """Returns the slot of ``position`` by the request's block table; None if this rank has none."""
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
    layout = block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave
    num_tokens = len(slot_mapping)
    batch = len(query_start_loc) - 1
    for i in range(batch):
        row = i if row_indices is None else int(row_indices[i])
        blocks = [int(b) for b in block_table[row]] if 0 <= row < len(block_table) else []
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        for n in range(max(begin, 0), min(end, num_tokens)):
            slot = slot_of(int(positions[n]), blocks, *layout) if n < len(positions) else None
            if slot is None:
                slot = pad_id
            slot_mapping[n] = wrap32(slot) if slot_mapping.dtype == np.int32 else slot
    slot_mapping[max(int(query_start_loc[batch]), 0) :] = pad_id


def correct_spec_state_(
    num_computed_tokens: Array,
    num_accepted_tokens: Array,
    positions: Array,
    seq_lens: Array,
    slot_mapping: Array,
    discard: Array | None,
    prev_positions: Array,
    num_sampled_prev: Array,
    num_draft_prev: Array,
    host_num_computed_tokens: Array,
    query_start_loc: Array,
    num_tokens: Array | None,
    block_table: Array,
    row_indices: Array | None,
    block_size: int,
    blocks_per_kv_block: int,
    cp_world: int,
    cp_rank: int,
    cp_interleave: int,
    pad_id: int,
    workspace: Array | None,
) -> None:
    """The first six are written. prev_positions and host_num_computed_tokens [B],
    query_start_loc [B+1], num_tokens [R], block_table [R,NB], row_indices [B]."""
    counts = num_computed_tokens, num_accepted_tokens
    before = prev_positions, num_sampled_prev, num_draft_prev
    correct_num_computed_tokens_(*counts, *before, host_num_computed_tokens)
    batch = len(prev_positions)
    for i in range(batch):
        computed = int(num_computed_tokens[i])
        begin, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        for n in range(max(begin, 0), min(end, len(positions))):
            positions[n] = computed + (n - begin)
        seq_lens[i] = wrap32(computed + (end - begin))
        if discard is not None:
            assert num_tokens is not None
            row = i if row_indices is None else int(row_indices[i])
            is_valid = 0 <= row < len(num_tokens)
            discard[i] = not is_valid or seq_lens[i] < num_tokens[row]
    seq_lens[batch:] = 0
    layout = block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave
    tokens = query_start_loc, positions, block_table, slot_mapping, row_indices
    compute_slot_mapping_(*tokens, *layout, pad_id)
