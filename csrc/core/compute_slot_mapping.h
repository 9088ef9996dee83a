// compute_slot_mapping_: the KV cache slot of each token. Contract: docs/ops/compute_slot_mapping.md.
#pragma once

#include "core/batch.h"

namespace ngram_npu {

// How positions are assigned to ranks and blocks. All >= 1 (cp_rank: in [0, cp_world)); block_size *
// blocks_per_kv_block * cp_world and cp_world * cp_interleave are below 2**31; with several ranks cp_interleave divides
// block_size * blocks_per_kv_block, so that no two positions share a slot.
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

// One request's blocks; `count` is 0 if its row lies outside the table.
struct BlockList {
  Gm<const int32_t> blocks;
  int64_t count;
};

NGRAM_FN BlockList blocks_of(const TokenRows<const int32_t>& block_table, int64_t row) {
  return block_table.has(row) ? BlockList{block_table[row], block_table.capacity} : BlockList{nullptr, 0};
}

constexpr int64_t kNoSlot = -1;

// `count` positions from `first` on have the slots slot, slot + 1, ...; or none of them has a slot (kNoSlot).
struct SlotRun {
  int64_t first;
  int64_t count;
  int64_t slot;
};

// The run that begins at `position`; `List` is a BlockList or a kernel's copy of one. Tokens are mostly in order, so
// the divisions are done once per run, not once per token.
template <class List>
NGRAM_FN SlotRun slot_run(const SlotLayout& l, const List& list, int64_t position) {
  if (position < 0) return {position, 1, kNoSlot};
  int64_t index;   // of the block in the request's row
  int64_t inside;  // the block
  int64_t count = INT64_MAX;
  if (l.cp_world == 1) {
    index = position / l.block_size;
    inside = position % l.block_size;
  } else {
    const int64_t virtual_size = l.block_size * l.blocks_per_kv_block * l.cp_world;
    const int64_t virtual_block = position / virtual_size;
    const int64_t offset = position % virtual_size;
    const int64_t chunk = offset / l.cp_interleave;
    const int64_t in_chunk = offset % l.cp_interleave;
    count = l.cp_interleave - in_chunk;
    if (chunk % l.cp_world != l.cp_rank) return {position, count, kNoSlot};
    const int64_t local = (chunk / l.cp_world) * l.cp_interleave + in_chunk;
    index = virtual_block * l.blocks_per_kv_block + local / l.block_size;
    inside = local % l.block_size;
  }
  count = smaller(count, l.block_size - inside);
  if (index >= list.count || list.blocks[index] < 0) return {position, count, kNoSlot};
  return {position, count, list.blocks[index] * l.block_size + inside};
}

// The slot of a position that may lie in the run. The difference of any two positions is exact as an unsigned number.
NGRAM_FN bool in_run(const SlotRun& run, int64_t position) {
  return static_cast<uint64_t>(position) - static_cast<uint64_t>(run.first) < static_cast<uint64_t>(run.count);
}
NGRAM_FN int64_t slot_in_run(const SlotRun& run, int64_t position) {
  return run.slot == kNoSlot ? kNoSlot : run.slot + (position - run.first);
}

}  // namespace ngram_npu
