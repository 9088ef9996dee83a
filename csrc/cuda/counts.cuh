// The correction of the counts in place, for the operator that does only that and for the one that goes on from it.
#pragma once

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

}  // namespace ngram_npu::cuda
