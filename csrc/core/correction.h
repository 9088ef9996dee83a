// Parameters and per-request functions of the operators that run between two forward passes and correct counts,
// positions, lengths and slots.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// correct_num_computed_tokens_: corrects the host's counts for rejected drafts. Contract:
// docs/ops/correct_num_computed_tokens.md.
struct CorrectNumComputedTokensParams {
  Gm<int32_t> num_computed_tokens;  // [>= B], written in [0, B)
  Gm<int32_t> num_accepted_tokens;  // [>= B], written in [0, B)
  IndexArray prev_positions;        // [B]
  Gm<const int32_t> num_sampled_prev;
  Gm<const int32_t> num_draft_prev;
  // The minimum of the sizes of num_computed_tokens, num_sampled_prev and num_draft_prev.
  int64_t num_previous;
  Gm<const int32_t> host_num_computed_tokens;  // [B]
  int64_t batch;
};

// A request's new counts. Without drafts in the previous step, num_computed is the host's count, and the request's
// num_accepted_tokens does not change.
struct CorrectedCounts {
  int32_t num_computed;
  int32_t num_accepted;
  bool changes_accepted;
};

// Batch position of request i in the previous step if the request had drafts in that step, otherwise -1. The type
// Counts is either the Params struct or a kernel's struct of staged copies with the same member names.
template <class Counts>
NGRAM_FN int64_t prev_position_with_drafts(const Counts& counts, int64_t i) {
  const int64_t position = counts.prev_positions[i];
  return position < 0 || position >= counts.num_previous || counts.num_draft_prev[position] <= 0 ? -1 : position;
}

// Number of tokens that the request at this batch position of the previous step gained in that step. The number is
// limited to the number that the host assumed, because the host allocated blocks for that number only.
template <class Counts>
NGRAM_FN int32_t limited_num_sampled(const Counts& counts, int64_t prev_position) {
  const int32_t num_sampled = counts.num_sampled_prev[prev_position];
  const int32_t num_drafts = counts.num_draft_prev[prev_position];
  return num_sampled > num_drafts ? num_drafts + 1 : num_sampled;
}

// Reads the old num_computed_tokens at the request's previous batch position, which may be another request's position
// now. The caller must therefore compute the counts of all requests before it writes any of them.
template <class Counts>
NGRAM_FN CorrectedCounts corrected_counts(const Counts& counts, int64_t i) {
  const int64_t prev_position = prev_position_with_drafts(counts, i);
  if (prev_position < 0) return {counts.host_num_computed_tokens[i], 0, false};
  const int32_t num_sampled = limited_num_sampled(counts, prev_position);
  return {wrap_add(counts.num_computed_tokens[prev_position], num_sampled), num_sampled, true};
}

// compute_slot_mapping_: the KV cache slot of each token. Contract: docs/ops/compute_slot_mapping.md.

// How positions are assigned to ranks and blocks. cp_rank is in [0, cp_world); all other fields are at least 1.
// block_size * blocks_per_kv_block * cp_world and cp_world * cp_interleave are below 2**31. With several ranks,
// cp_interleave divides block_size * blocks_per_kv_block, so that no two positions share a slot.
struct SlotLayout {
  int64_t block_size;
  int64_t blocks_per_kv_block;
  int64_t cp_world;
  int64_t cp_rank;
  int64_t cp_interleave;
};

struct ComputeSlotMappingParams {
  Gm<const int32_t> query_start_loc;     // [B + 1]
  Gm<const int64_t> positions;           // [P]
  int64_t num_positions;                 // P
  TokenRows<const int32_t> block_table;  // [R, NB]
  IndexArray row_indices;                // [B]
  int64_t batch;
  Gm<void> slot_mapping;  // [num_slots], written
  int64_t num_slots;
  int32_t slot_bytes;  // 4 or 8
  SlotLayout layout;
  int64_t pad_id;
};

// The blocks of one request; `count` is 0 if the request's row lies outside the table.
struct BlockList {
  Gm<const int32_t> blocks;
  int64_t count;
};

NGRAM_FN BlockList blocks_of(const TokenRows<const int32_t>& block_table, int64_t row) {
  return block_table.has(row) ? BlockList{block_table[row], block_table.capacity} : BlockList{nullptr, 0};
}

constexpr int64_t kNoSlot = -1;

// A run of `count` positions starting at `first`. Their slots are slot, slot + 1, ...; if `slot` is kNoSlot, none of
// these positions has a slot.
struct SlotRun {
  int64_t first;
  int64_t count;
  int64_t slot;
};

// The division of slot_run(). Kernels replace it if the device divides 64-bit integers slowly. n >= 0, divisor >= 1.
struct NativeDivision {
  NGRAM_FN static int64_t divide(int64_t n, int64_t divisor) { return n / divisor; }
};

// A run of positions that are in one block, or that have no slot on this rank.
struct BlockRun {
  int64_t first;
  int64_t count;
  int64_t block_index;  // in the request's row; -1: no slot on this rank
  int64_t block_offset;

  NGRAM_FN bool has_block(int64_t num_blocks) const { return block_index >= 0 && block_index < num_blocks; }
};

// The run that begins at `position`. Most positions are consecutive, so the divisions are done once per run, not once
// per token.
template <class Division = NativeDivision>
NGRAM_FN BlockRun block_run(const SlotLayout& layout, int64_t position) {
  if (position < 0) return {position, 1, -1, 0};
  int64_t first_block = 0;         // index of the KV block's first block in the request's row
  int64_t rank_offset = position;  // of the position, in the tokens that this rank stores of the KV block
  int64_t count = INT64_MAX;
  if (layout.cp_world > 1) {
    const int64_t virtual_size = layout.block_size * layout.blocks_per_kv_block * layout.cp_world;
    const int64_t virtual_block = Division::divide(position, virtual_size);
    const int64_t virtual_offset = position - virtual_block * virtual_size;
    const int64_t chunk = Division::divide(virtual_offset, layout.cp_interleave);
    const int64_t chunk_offset = virtual_offset - chunk * layout.cp_interleave;
    const int64_t rank_chunk = Division::divide(chunk, layout.cp_world);
    count = layout.cp_interleave - chunk_offset;
    if (chunk - rank_chunk * layout.cp_world != layout.cp_rank) return {position, count, -1, 0};
    first_block = virtual_block * layout.blocks_per_kv_block;
    rank_offset = rank_chunk * layout.cp_interleave + chunk_offset;
  }
  const int64_t block = Division::divide(rank_offset, layout.block_size);
  const int64_t block_offset = rank_offset - block * layout.block_size;
  return {position, smaller(count, layout.block_size - block_offset), first_block + block, block_offset};
}

// The slots of a run in a block with this id.
NGRAM_FN SlotRun slot_run(const SlotLayout& layout, const BlockRun& run, int64_t block_id) {
  return {run.first, run.count, block_id < 0 ? kNoSlot : block_id * layout.block_size + run.block_offset};
}
NGRAM_FN SlotRun slot_run(const SlotLayout& layout, const BlockList& list, int64_t position) {
  const BlockRun run = block_run(layout, position);
  return slot_run(layout, run, run.has_block(list.count) ? list.blocks[run.block_index] : -1);
}

// The comparison uses unsigned numbers, because the difference of two positions could overflow an int64.
NGRAM_FN bool is_in_run(const SlotRun& run, int64_t position) {
  return static_cast<uint64_t>(position) - static_cast<uint64_t>(run.first) < static_cast<uint64_t>(run.count);
}
NGRAM_FN int64_t slot_at(const SlotRun& run, int64_t position) {
  return run.slot == kNoSlot ? kNoSlot : run.slot + (position - run.first);
}

// correct_spec_state_: makes all corrections between two forward passes. Contract: docs/ops/correct_spec_state.md.
struct CorrectSpecStateParams {
  CorrectNumComputedTokensParams counts;
  ComputeSlotMappingParams slots;  // slots.positions is the member `positions` below
  Gm<int64_t> positions;           // [slots.num_positions], written
  Gm<int32_t> seq_lens;            // [num_seq_lens], written
  int64_t num_seq_lens;
  Gm<uint8_t> discard;           // [>= B], written in [0, B); null: not requested
  Gm<const int32_t> num_tokens;  // [num_rows]; read only if discard is given
  int64_t num_rows;
  Gm<void> workspace;  // device backends only
};

// Words of workspace that are enough on any device: one counter of finished thread blocks (cuda/correction.cu).
constexpr int64_t kCorrectSpecStateWorkspaceWords = 1;

// The position of token n of the flat batch. The token's request begins at token `begin`.
NGRAM_FN int64_t position_of_token(int64_t n, int32_t begin, int32_t num_computed) {
  return num_computed + (n - begin);
}

template <class Offsets>
NGRAM_FN int32_t sequence_length(const Offsets& query_start_loc, int64_t i, int32_t num_computed) {
  return wrap_add(num_computed, num_scheduled_tokens(query_start_loc, i));
}

// Whether the request's sampled token must be discarded, because the step ends before the request's known tokens end or
// because the request has no row. The type State is either the Params struct or a kernel's struct with a copy of
// num_tokens.
template <class State>
NGRAM_FN bool should_discard_row(const State& p, int64_t row, int32_t seq_len) {
  return row < 0 || row >= p.num_rows || seq_len < p.num_tokens[row];
}
NGRAM_FN bool should_discard(const CorrectSpecStateParams& p, int64_t i, int32_t seq_len) {
  return should_discard_row(p, p.slots.row_indices[i], seq_len);
}

}  // namespace ngram_npu
