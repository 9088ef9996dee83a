// Slots token by token, for the operator that reads positions and for the one that has just made them.
#pragma once

#include "core/compute_slot_mapping.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

// The request whose token n is; -1 before the first request, `batch` behind the last. Tokens are shared out evenly to
// the threads, whatever the requests' lengths, and each looks its request up. Any offsets give a result in this range.
__device__ inline int64_t request_of(const int32_t* query_start_loc, int64_t batch, int64_t n) {
  int64_t low = 0, high = batch + 1;  // the first offset above n lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (query_start_loc[middle] > n) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low - 1;
}

// Token n of `request` (its position, where it has one, given by `position_at`): its slot, or the padding.
template <class Slot, class Position>
__device__ inline void write_slot(const ComputeSlotMappingParams& p, int64_t request, int64_t n,
                                  const Position& position_at) {
  if (request < 0) return;
  int64_t slot = kNoSlot;
  if (request < p.batch && n < p.num_positions) {
    slot = slot_run(p.layout, blocks_of(p.block_table, p.row_indices[request]), position_at()).slot;
  }
  static_cast<Slot*>(p.slot_mapping)[n] = static_cast<Slot>(slot == kNoSlot ? p.pad_id : slot);
}

}  // namespace ngram_npu::cuda
