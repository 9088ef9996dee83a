// CUDA kernel of merge_drafts_.
#include "core/merging.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 64;
constexpr AcceptanceProbabilities kAcceptanceProbabilities;

// The probabilities are a kernel parameter, so that they are in constant memory.
template <class Token>
__global__ void __launch_bounds__(kThreads)
    merge_drafts_kernel(const MergeDraftsParams p, const AcceptanceProbabilities probabilities) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.batch) merge_drafts<Token>(p, probabilities, i);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_merge_drafts_(const MergeDraftsParams* params, void* stream) {
  const dim3 grid = cuda::blocks_for(params->batch, cuda::kThreads);
  const auto kernel =
      params->token_bytes == 8 ? cuda::merge_drafts_kernel<int64_t> : cuda::merge_drafts_kernel<int32_t>;
  return cuda::launch(kernel, {grid, cuda::kThreads}, stream, *params, cuda::kAcceptanceProbabilities);
}
