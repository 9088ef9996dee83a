// What the entry points need of the CUDA runtime. Kernels are launched by cudaLaunchKernelEx and not by <<<>>>, so that
// any C++ compiler can read the sources.
#pragma once

#include <cuda_runtime.h>

#include "core/common.h"

namespace ngram_npu::cuda {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Multiprocessors of the current device; it never waits, and may be called under graph capture.
int32_t num_multiprocessors();

// The grid of one thread, or warp, or block for each of `items`, where a block takes `per_block` of them. At least one
// block: a launch may not be empty.
inline dim3 blocks_for(int64_t items, int32_t per_block) {
  return dim3(static_cast<uint32_t>(larger<int64_t>((items + per_block - 1) / per_block, 1)));
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
