#pragma once

#include "core/compute_slot_mapping_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// The arguments of the slot mapping, for the two operators that have them. `batch` -1: what query_start_loc says.
ComputeSlotMappingParams check_slots(Arguments& arguments, const TensorView& query_start_loc, int64_t batch,
                                     const TensorView& positions, Arguments::Access positions_access,
                                     const TensorView& block_table, const TensorView* row_indices,
                                     const TensorView& slot_mapping, const SlotLayout& layout, int64_t pad_id);

ComputeSlotMappingParams check_compute_slot_mapping_(const TensorView& query_start_loc, const TensorView& positions,
                                                     const TensorView& block_table, const TensorView* row_indices,
                                                     const TensorView& slot_mapping, int64_t block_size,
                                                     int64_t blocks_per_kv_block, int64_t cp_world, int64_t cp_rank,
                                                     int64_t cp_interleave, int64_t pad_id);

}  // namespace ngram_npu::host
