"""The reference of the state correction of asynchronous scheduling: docs/ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from ops.reference.bookkeeping import row_of, wrap32
from ops.schema import Arguments, arguments_of, reference_operator

__all__ = [
    "compute_slot_mapping_",
    "correct_num_computed_tokens_",
    "correct_spec_state_",
]


@reference_operator
def correct_num_computed_tokens_(a: Arguments) -> None:
    """num_computed_tokens [N] and num_accepted_tokens [at least B] are written; prev_positions and
    host_num_computed_tokens [B]; num_sampled_prev and num_draft_prev of any length."""
    old = a.num_computed_tokens.copy()
    previous = min(len(old), len(a.num_sampled_prev), len(a.num_draft_prev))
    for i, p in enumerate(map(int, a.prev_positions)):
        if 0 <= p < previous and a.num_draft_prev[p] > 0:
            sampled = min(int(a.num_sampled_prev[p]), int(a.num_draft_prev[p]) + 1)
            a.num_computed_tokens[i] = wrap32(int(old[p]) + sampled)
            a.num_accepted_tokens[i] = sampled
        else:
            a.num_computed_tokens[i] = a.host_num_computed_tokens[i]


def slot_of(a: Arguments, position: int, blocks: list[int]) -> int | None:
    """Returns the slot of ``position`` by the request's block table; None if this rank has none."""
    if position < 0:
        return None
    block_tokens = a.block_size * a.blocks_per_kv_block * a.cp_world
    virtual_block, offset = divmod(position, block_tokens)
    chunk, within = divmod(offset, a.cp_interleave)
    if chunk % a.cp_world != a.cp_rank:
        return None
    local = chunk // a.cp_world * a.cp_interleave + within
    index = virtual_block * a.blocks_per_kv_block + local // a.block_size
    if index >= len(blocks) or blocks[index] < 0:
        return None
    return int(blocks[index] * a.block_size + local % a.block_size)


@reference_operator
def compute_slot_mapping_(a: Arguments) -> None:
    """query_start_loc [B+1], positions [P] int64, block_table [R,NB], row_indices [B];
    slot_mapping, int32 or int64, is written."""
    num_tokens = len(a.slot_mapping)
    batch = len(a.query_start_loc) - 1
    for i in range(batch):
        row = row_of(a, i)
        blocks = [int(b) for b in a.block_table[row]] if 0 <= row < len(a.block_table) else []
        begin, end = int(a.query_start_loc[i]), int(a.query_start_loc[i + 1])
        for n in range(max(begin, 0), min(end, num_tokens)):
            slot = slot_of(a, int(a.positions[n]), blocks) if n < len(a.positions) else None
            if slot is None:
                slot = a.pad_id
            a.slot_mapping[n] = wrap32(slot) if a.slot_mapping.dtype == np.int32 else slot
    a.slot_mapping[max(int(a.query_start_loc[batch]), 0) :] = a.pad_id


@reference_operator
def correct_spec_state_(a: Arguments) -> None:
    """The first six are written. prev_positions and host_num_computed_tokens [B],
    query_start_loc [B+1], num_tokens [R], block_table [R,NB], row_indices [B]."""
    correct_num_computed_tokens_(**select(a, "correct_num_computed_tokens_"))
    batch = len(a.prev_positions)
    for i in range(batch):
        computed = int(a.num_computed_tokens[i])
        begin, end = int(a.query_start_loc[i]), int(a.query_start_loc[i + 1])
        for n in range(max(begin, 0), min(end, len(a.positions))):
            a.positions[n] = computed + (n - begin)
        a.seq_lens[i] = wrap32(computed + (end - begin))
        if a.discard is not None:
            row = row_of(a, i)
            is_valid = 0 <= row < len(a.num_tokens)
            a.discard[i] = not is_valid or a.seq_lens[i] < a.num_tokens[row]
    a.seq_lens[batch:] = 0
    compute_slot_mapping_(**select(a, "compute_slot_mapping_"))


def select(a: Arguments, op: str) -> dict[str, Any]:
    """Returns the arguments of another operator by name."""
    return {name: getattr(a, name) for name, _ in arguments_of(op)}
