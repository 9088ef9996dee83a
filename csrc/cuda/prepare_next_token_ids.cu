#include "core/prepare_next_token_ids.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads) prepare_next_token_ids_kernel(const PrepareNextTokenIdsParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.batch) return;
  const NextToken next = next_token(p, i);
  p.next_token_ids[i] = next.token;
  p.num_sampled[i] = next.num_sampled;
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void* stream) {
  const dim3 grid = cuda::blocks_for(params->batch, cuda::kThreads);
  return cuda::launch(cuda::prepare_next_token_ids_kernel, grid, cuda::kThreads, stream, *params);
}
