// What the entry points need of the CUDA runtime. Kernels are launched by cudaLaunchKernelEx and not by <<<>>>, so that
// any C++ compiler can read the sources.
#pragma once

#include <cuda_runtime.h>

#include "core/common.h"

namespace ngram_npu::cuda {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// How many blocks of a kernel the current device runs at once; it never waits, and may be called under graph capture.
int32_t resident_blocks(const void* kernel, int32_t threads);

// The grid of one thread, or warp, or block for each of `items`, where a block takes `per_block` of them. At least one
// block: a launch may not be empty.
inline dim3 blocks_for(int64_t items, int32_t per_block) {
  return dim3(static_cast<uint32_t>(larger<int64_t>((items + per_block - 1) / per_block, 1)));
}

// Counts this block in: how many came before. It sees what those wrote, and those that follow see what it wrote.
__device__ inline uint32_t arrive(uint32_t* arrived) {
  return __nv_atomic_fetch_add(arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
}

// Whether this block is the last of the grid to come here, and so sees what all wrote, and that all have read. All
// threads must call it; the last block has to zero *arrived. `last` is a place of the block's in shared memory.
__device__ inline bool is_last_block(uint32_t* arrived, bool* last) {
  __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) *last = arrive(arrived) == gridDim.x - 1;
  __syncthreads();
  return *last;
}

// Each lane's sum of the values up to and including its own.
template <class Int>
__device__ Int sum_over_warp(Int value) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t distance = 1; distance < kWarpSize; distance *= 2) {
    const Int before = __shfl_up_sync(kWholeWarp, value, static_cast<uint32_t>(distance));
    if (lane >= distance) value += before;
  }
  return value;
}

// The Status that an entry point returns; the text of an error is kept for ngram_npu_cuda_error().
int32_t status_of(cudaError_t error);

template <class... Parameters, class... Arguments>
int32_t launch(void (*kernel)(Parameters...), dim3 grid, int32_t threads, void* stream, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace ngram_npu::cuda

// The CUDA version of the kernels' runtime, as 1000 * major + 10 * minor. A driver of an older major version cannot run
// them.
NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_runtime_version();

// Why the calling thread's last launch failed; empty where it did not.
NGRAM_NPU_EXPORT const char* ngram_npu_cuda_error();
