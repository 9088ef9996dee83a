// The parts of correct_spec_state_ that are operators of their own: counts corrected in place, and slots token by
// token.
#pragma once

#include "core/compute_slot_mapping.h"
#include "core/correct_num_computed_tokens.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

// A request's new num_computed_tokens may not be written while others still read old ones. Until then it waits where
// the request's num_accepted_tokens will be, which nobody reads: so no batch is too large, and no other room is needed.
__device__ inline void stage_counts(const CorrectNumComputedTokensParams& p, int64_t i, const CorrectedCounts& counts) {
  if (counts.accepted_changes) p.num_accepted_tokens[i] = counts.num_computed;
}

// To be called once all requests are staged.
__device__ inline void settle_counts(const CorrectNumComputedTokensParams& p, int64_t i) {
  const int64_t drafted = drafted_at(p, i);
  if (drafted < 0) {
    p.num_computed_tokens[i] = p.host_num_computed_tokens[i];
  } else {
    p.num_computed_tokens[i] = p.num_accepted_tokens[i];
    p.num_accepted_tokens[i] = sampled_at(p, drafted);
  }
}

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
template <class Position>
__device__ void write_slot(const ComputeSlotMappingParams& p, int64_t request, int64_t n, const Position& position_at) {
  if (request < 0) return;
  int64_t slot = kNoSlot;
  if (request < p.batch && n < p.num_positions) {
    slot = slot_run(p.layout, blocks_of(p.block_table, p.row_indices[request]), position_at()).slot;
  }
  if (slot == kNoSlot) slot = p.pad_id;
  if (p.slot_bytes == 8) {
    static_cast<int64_t*>(p.slot_mapping)[n] = slot;
  } else {
    static_cast<int32_t*>(p.slot_mapping)[n] = static_cast<int32_t>(slot);
  }
}

}  // namespace ngram_npu::cuda
