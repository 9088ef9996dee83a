"""Reference of ``correct_spec_state_``; the definition is in docs/ops/correct_spec_state.md."""

from __future__ import annotations

from ngram_npu.reference.compute_slot_mapping import compute_slot_mapping_
from ngram_npu.reference.correct_num_computed_tokens import correct_num_computed_tokens_
from ngram_npu.reference.integers import wrap32
from ngram_npu.reference.ngram_propose import Array


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
    correct_num_computed_tokens_(
        num_computed_tokens,
        num_accepted_tokens,
        prev_positions,
        num_sampled_prev,
        num_draft_prev,
        host_num_computed_tokens,
    )
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
            usable = 0 <= row < len(num_tokens)
            discard[i] = not usable or seq_lens[i] < num_tokens[row]
    seq_lens[batch:] = 0
    compute_slot_mapping_(
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        row_indices,
        block_size,
        blocks_per_kv_block,
        cp_world,
        cp_rank,
        cp_interleave,
        pad_id,
    )
