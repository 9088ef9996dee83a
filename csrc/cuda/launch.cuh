// Functions that launch kernels, and device functions that kernels share. Kernels are launched with cudaLaunchKernelEx
// instead of <<<>>>, so that any C++ compiler can compile the sources.
#pragma once

#include <cuda_runtime.h>

#include "core/common.h"

namespace ngram_npu::cuda {

// The dynamic shared memory of the block. The model of a GPU in tests/twins defines a function for it.
#if defined(__CUDACC__)
extern __shared__ int4 dynamic_shared_memory[];
#endif

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Returns the number of blocks of a kernel that the current device runs concurrently. Does not wait for the device;
// allowed during graph capture.
int32_t resident_blocks(const void* kernel, int32_t threads, size_t shared_bytes);

// Returns the grid for one thread, warp or block per item, with per_block items per block. The grid has at least one
// block, because a launch must not be empty.
inline dim3 blocks_for(int64_t items, int32_t per_block) {
  return dim3(static_cast<uint32_t>(larger<int64_t>((items + per_block - 1) / per_block, 1)));
}

// Adds this block to *num_arrived and returns the number of earlier blocks. This block sees the writes of the earlier
// blocks, and later blocks see the writes of this block.
__device__ inline uint32_t arrive(uint32_t* num_arrived) {
#if defined(__CUDACC__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1208
  // The instruction that later releases of nvcc generate for the function below.
  uint32_t num_earlier;
  asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(num_earlier) : "l"(num_arrived) : "memory");
  return num_earlier;
#else
  return __nv_atomic_fetch_add(num_arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
#endif
}

// Whether this block is the last of the grid to arrive. The last block sees the writes of all blocks, and the other
// blocks have finished their reads. All threads must call this function. *num_arrived was 0 before the launch.
// `is_last` is in shared memory.
__device__ inline bool is_last_block(uint32_t* num_arrived, bool* is_last) {
  __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) *is_last = arrive(num_arrived) == gridDim.x - 1;
  __syncthreads();
  return *is_last;
}

// Returns how many lanes precede the first lane without `condition`, in every lane of a warp.
__device__ inline int32_t count_leading_lanes(bool condition) {
  const uint32_t lanes = __ballot_sync(kWholeWarp, condition);
  return lanes == kWholeWarp ? kWarpSize : __ffs(static_cast<int32_t>(~lanes)) - 1;
}

// Returns the sum of the values of this lane and all lower lanes.
template <class Int>
__device__ Int prefix_sum_over_warp(Int value) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t distance = 1; distance < kWarpSize; distance *= 2) {
    const Int lower_sum = __shfl_up_sync(kWholeWarp, value, static_cast<uint32_t>(distance));
    if (lane >= distance) value += lower_sum;
  }
  return value;
}

// Returns the sum of the values of this thread and all lower threads of the block; *total is the sum over all threads.
// `warp_sums` is shared memory with one item per warp. Outside this call, no thread may access it between the last
// barrier before and the next barrier after the call.
template <class Int>
__device__ Int prefix_sum_over_block(Int value, Int* warp_sums, Int* total) {
  const auto thread = static_cast<int32_t>(threadIdx.x), warps = static_cast<int32_t>(blockDim.x) / kWarpSize;
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const Int in_warp = prefix_sum_over_warp(value);
  if (lane == kWarpSize - 1) warp_sums[warp] = in_warp;
  __syncthreads();
  const Int sum = prefix_sum_over_warp(lane < warps ? warp_sums[lane] : Int{0});
  *total = __shfl_sync(kWholeWarp, sum, warps - 1);
  return in_warp + (warp > 0 ? __shfl_sync(kWholeWarp, sum, warp - 1) : Int{0});
}

// Returns the Status for an entry point to return, and keeps the text of an error for ngram_npu_cuda_error().
int32_t status_of(cudaError_t error);

struct LaunchShape {
  dim3 grid;
  int32_t threads;          // per block
  size_t shared_bytes = 0;  // dynamic shared memory per block
};

// The dynamic shared memory of a block that a kernel may use without cudaFuncSetAttribute() is 48 KiB, less its static
// shared memory.
constexpr size_t kDefaultSharedBytes = size_t{47} << 10;
// The largest dynamic shared memory of any launch. Every launch sets this limit, which belongs to the kernel on a
// device: a smaller value would fail a larger launch of another thread.
constexpr size_t kMaxSharedBytes = size_t{65} << 10;

inline cudaError_t allow_shared_bytes(const void* kernel, size_t shared_bytes) {
  if (shared_bytes <= kDefaultSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMaxSharedBytes));
}

template <class... Parameters, class... Arguments>
int32_t launch(void (*kernel)(Parameters...), LaunchShape shape, void* stream, Arguments... arguments) {
  const int32_t status = status_of(allow_shared_bytes(reinterpret_cast<const void*>(kernel), shape.shared_bytes));
  if (status != kOk) return status;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<uint32_t>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Zeroes a call's workspace before its launch, because an earlier call that used the memory may have failed.
inline int32_t zero_workspace(void* workspace, int64_t words, void* stream) {
  if (workspace == nullptr) return kInvalidParams;
  const size_t bytes = static_cast<size_t>(words) * sizeof(int32_t);
  return status_of(cudaMemsetAsync(workspace, 0, bytes, static_cast<cudaStream_t>(stream)));
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

// Launches an operator with independent items: kLanes threads call write_item(), which is defined next to its
// parameters, for each of `count` items.
template <int32_t kLanes = 1, class Params>
int32_t launch_items(const Params& p, int64_t count, void* stream) {
  return launch(items_kernel<kLanes, Params>, {blocks_for(count, kItemThreads / kLanes), kItemThreads}, stream, p,
                count);
}

}  // namespace ngram_npu::cuda

// Returns the CUDA version of the kernels' runtime, as 1000 * major + 10 * minor. A driver of an older major version
// cannot run the kernels.
NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_runtime_version();

// Returns the reason why the calling thread's last launch failed; empty if it did not fail.
NGRAM_NPU_EXPORT const char* ngram_npu_cuda_error();
