#include "core/prepare_inputs_padded.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads) prepare_inputs_padded_kernel(const PrepareInputsPaddedParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.batch) return;
  const int32_t rejected = rejected_of(p, i);
  p.num_rejected[i] = rejected;
  p.token_indices_to_sample[i] = index_to_sample(p, i, rejected);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void* stream) {
  const dim3 grid = cuda::blocks_for(params->batch, cuda::kThreads);
  return cuda::launch(cuda::prepare_inputs_padded_kernel, grid, cuda::kThreads, stream, *params);
}
