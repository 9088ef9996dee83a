"""References of the state correction of asynchronous scheduling, defined in docs/ops."""

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
def correct_num_computed_tokens_(args: Arguments) -> None:
    """num_computed_tokens [N] and num_accepted_tokens [at least B] are written; prev_positions and
    host_num_computed_tokens [B]; num_sampled_prev and num_draft_prev of any length."""
    old_counts = args.num_computed_tokens.copy()
    num_previous = min(len(old_counts), len(args.num_sampled_prev), len(args.num_draft_prev))
    for i, previous in enumerate(map(int, args.prev_positions)):
        if 0 <= previous < num_previous and args.num_draft_prev[previous] > 0:
            max_sampled = int(args.num_draft_prev[previous]) + 1
            sampled = min(int(args.num_sampled_prev[previous]), max_sampled)
            args.num_computed_tokens[i] = wrap32(int(old_counts[previous]) + sampled)
            args.num_accepted_tokens[i] = sampled
        else:
            args.num_computed_tokens[i] = args.host_num_computed_tokens[i]


def find_slot(args: Arguments, position: int, blocks: list[int]) -> int | None:
    """Returns the slot of ``position``; None if this rank or the block table has none."""
    if position < 0:
        return None
    block_tokens = args.block_size * args.blocks_per_kv_block * args.cp_world
    virtual_block, offset = divmod(position, block_tokens)
    chunk, chunk_offset = divmod(offset, args.cp_interleave)
    if chunk % args.cp_world != args.cp_rank:
        return None
    rank_offset = chunk // args.cp_world * args.cp_interleave + chunk_offset
    index = virtual_block * args.blocks_per_kv_block + rank_offset // args.block_size
    if index >= len(blocks) or blocks[index] < 0:
        return None
    return int(blocks[index] * args.block_size + rank_offset % args.block_size)


@reference_operator
def compute_slot_mapping_(args: Arguments) -> None:
    """query_start_loc [B+1], positions [P] int64, block_table [R,NB], row_indices [B];
    slot_mapping, int32 or int64, is written."""
    num_tokens = len(args.slot_mapping)
    batch = len(args.query_start_loc) - 1
    for i in range(batch):
        row = row_of(args, i)
        blocks = [int(b) for b in args.block_table[row]] if 0 <= row < len(args.block_table) else []
        begin, end = int(args.query_start_loc[i]), int(args.query_start_loc[i + 1])
        for token in range(max(begin, 0), min(end, num_tokens)):
            has_position = token < len(args.positions)
            slot = find_slot(args, int(args.positions[token]), blocks) if has_position else None
            if slot is None:
                slot = args.pad_id
            args.slot_mapping[token] = wrap32(slot) if args.slot_mapping.dtype == np.int32 else slot
    args.slot_mapping[max(int(args.query_start_loc[batch]), 0) :] = args.pad_id


@reference_operator
def correct_spec_state_(args: Arguments) -> None:
    """The first six tensors are written. prev_positions and host_num_computed_tokens [B],
    query_start_loc [B+1], num_tokens [R], block_table [R,NB], row_indices [B]."""
    correct_num_computed_tokens_(**select_arguments(args, "correct_num_computed_tokens_"))
    batch = len(args.prev_positions)
    for i in range(batch):
        computed = int(args.num_computed_tokens[i])
        begin, end = int(args.query_start_loc[i]), int(args.query_start_loc[i + 1])
        for token in range(max(begin, 0), min(end, len(args.positions))):
            args.positions[token] = computed + (token - begin)
        args.seq_lens[i] = wrap32(computed + (end - begin))
        if args.discard is not None:
            row = row_of(args, i)
            is_valid = 0 <= row < len(args.num_tokens)
            args.discard[i] = not is_valid or args.seq_lens[i] < args.num_tokens[row]
    args.seq_lens[batch:] = 0
    compute_slot_mapping_(**select_arguments(args, "compute_slot_mapping_"))


def select_arguments(args: Arguments, op: str) -> dict[str, Any]:
    """Returns the arguments of the operator ``op`` by name, which are a subset of ``args``."""
    return {name: getattr(args, name) for name, _ in arguments_of(op)}
