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

// Each thread's sum of the values up to and including its own, and all threads' in *total. `warp_sums` is shared
// memory, a place for each warp; nobody may be using it.
template <class Int>
__device__ Int sum_over_block(Int value, Int* warp_sums, Int* total) {
  const auto thread = static_cast<int32_t>(threadIdx.x), warps = static_cast<int32_t>(blockDim.x) / kWarpSize;
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const Int in_warp = sum_over_warp(value);
  if (lane == kWarpSize - 1) warp_sums[warp] = in_warp;
  __syncthreads();
  const Int upto = sum_over_warp(lane < warps ? warp_sums[lane] : Int{0});
  *total = __shfl_sync(kWholeWarp, upto, warps - 1);
  return in_warp + (warp > 0 ? __shfl_sync(kWholeWarp, upto, warp - 1) : Int{0});
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

constexpr int32_t kItemThreads = 128;

template <int32_t kLanes, class Params>
__global__ void __launch_bounds__(kItemThreads) items_kernel(const __grid_constant__ Params p, int64_t count) {
  const int64_t thread = int64_t{blockIdx.x} * kItemThreads + threadIdx.x, i = thread / kLanes;
  if (i >= count) return;
  if constexpr (kLanes == 1) {
    write_item(p, i);
  } else {
    write_item(p, i, thread % kLanes, kLanes);
  }
}

// An operator whose items have nothing to do with each other: write_item(), which stands beside its parameters, for
// each of `count` items by kLanes threads.
template <int32_t kLanes = 1, class Params>
int32_t launch_items(const Params& p, int64_t count, void* stream) {
  return launch(items_kernel<kLanes, Params>, blocks_for(count, kItemThreads / kLanes), kItemThreads, stream, p, count);
}

}  // namespace ngram_npu::cuda

// The CUDA version of the kernels' runtime, as 1000 * major + 10 * minor. A driver of an older major version cannot run
// them.
NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_runtime_version();

// Why the calling thread's last launch failed; empty where it did not.
NGRAM_NPU_EXPORT const char* ngram_npu_cuda_error();
