#include "host/compute_slot_mapping_.h"

namespace ngram_npu::host {
namespace {

// Products stay below 2**31, so that a device may hold them in 32 bits.
SlotLayout check_layout(Arguments& arguments, const SlotLayout& l) {
  arguments.scalar("block_size", l.block_size, 1, INT32_MAX);
  arguments.scalar("blocks_per_kv_block", l.blocks_per_kv_block, 1, INT32_MAX / l.block_size);
  const int64_t kv_block = l.block_size * l.blocks_per_kv_block;
  arguments.scalar("cp_world", l.cp_world, 1, INT32_MAX / kv_block);
  arguments.scalar("cp_rank", l.cp_rank, 0, l.cp_world - 1);
  arguments.scalar("cp_interleave", l.cp_interleave, 1, INT32_MAX / l.cp_world);
  if (l.cp_world > 1 && kv_block % l.cp_interleave != 0) {
    arguments.fail("cp_interleave", "a divisor of " + std::to_string(kv_block) + " (block_size * blocks_per_kv_block)",
                   std::to_string(l.cp_interleave));
  }
  return l;
}

}  // namespace

ComputeSlotMappingParams check_slots(Arguments& arguments, const TensorView& query_start_loc, int64_t batch,
                                     const TensorView& positions, Arguments::Access positions_access,
                                     const TensorView& block_table, const TensorView* row_indices,
                                     const TensorView& slot_mapping, const SlotLayout& layout, int64_t pad_id) {
  ComputeSlotMappingParams p{};
  p.batch = arguments.query_start_loc(query_start_loc, batch);
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data);
  arguments.vector("positions", positions, {DType::kInt64}, -1, positions_access);
  p.positions = static_cast<const int64_t*>(positions.data);
  p.num_positions = positions.sizes[0];
  arguments.matrix("block_table", block_table, DType::kInt32);
  p.block_table = token_rows<const int32_t>(block_table);
  p.row_indices = arguments.indices("row_indices", row_indices, p.batch);
  if (row_indices == nullptr) {
    arguments.at_most("query_start_loc", "batch", p.batch, p.block_table.rows,
                      "rows of block_table, without row_indices");
  }
  arguments.vector("slot_mapping", slot_mapping, {DType::kInt32, DType::kInt64}, -1, Arguments::kWrite);
  p.slot_mapping = slot_mapping.data;
  p.num_slots = slot_mapping.sizes[0];
  p.slot_bytes = static_cast<int32_t>(slot_mapping.item_bytes);
  p.layout = check_layout(arguments, layout);
  if (p.slot_bytes == 4) arguments.scalar("pad_id", pad_id, INT32_MIN, INT32_MAX);
  p.pad_id = pad_id;
  return p;
}

ComputeSlotMappingParams check_compute_slot_mapping_(const TensorView& query_start_loc, const TensorView& positions,
                                                     const TensorView& block_table, const TensorView* row_indices,
                                                     const TensorView& slot_mapping, int64_t block_size,
                                                     int64_t blocks_per_kv_block, int64_t cp_world, int64_t cp_rank,
                                                     int64_t cp_interleave, int64_t pad_id) {
  Arguments arguments("compute_slot_mapping_");
  const SlotLayout layout{block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave};
  const auto p = check_slots(arguments, query_start_loc, -1, positions, Arguments::kRead, block_table, row_indices,
                             slot_mapping, layout, pad_id);
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
