// Which of a request's sampled tokens count, asked by a whole warp.
#pragma once

#include "core/sampled.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

// leading_run(), with one load a lane instead of a chain of them.
__device__ inline int64_t leading_run_by_warp(const int32_t* sampled, int64_t width, int64_t vocab_size) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0;; first += kWarpSize) {
    const int32_t k = first + lane;
    const uint32_t valid = __ballot_sync(kWholeWarp, k < width && is_valid_token(sampled[k], vocab_size));
    if (valid != kWholeWarp) return first + __ffs(static_cast<int32_t>(~valid)) - 1;
  }
}

}  // namespace ngram_npu::cuda
