#include "cuda/spec_state.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 1024;

// One block, so that a barrier parts the reading of old counts from the writing of new ones.
__global__ void __launch_bounds__(kThreads) correct_num_computed_tokens_kernel(const CorrectNumComputedTokensParams p) {
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) stage_counts(p, i, corrected(p, i));
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) settle_counts(p, i);
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_correct_num_computed_tokens_(const CorrectNumComputedTokensParams* params,
                                                                     void* stream) {
  return launch(correct_num_computed_tokens_kernel, dim3(1), kThreads, stream, *params);
}

}  // namespace ngram_npu::cuda
