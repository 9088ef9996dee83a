// CUDA kernels of the operators that process sampled tokens and prepare the drafter's batch.
#include "core/bookkeeping.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kWarps = kThreads / kWarpSize;

// Uses one block, because each request needs the sum over all earlier requests. The block processes the requests in
// chunks of one request per thread.
__global__ void __launch_bounds__(kThreads) prepare_inputs_kernel(const PrepareInputsParams p) {
  __shared__ int64_t warp_sums[kWarps];
  __shared__ int64_t kept_before[kThreads + 1];  // per request of the chunk; item r + 1 is also the end of request r
  const auto thread = static_cast<int32_t>(threadIdx.x);
  int64_t kept_before_chunk = 0;  // number of tokens kept by earlier chunks; query_start_loc_out has its low 32 bits
  if (thread == 0) p.query_start_loc_out[0] = 0;
  for (int64_t first = 0; first < p.batch; first += kThreads) {
    const int64_t i = first + thread;
    int64_t num_kept = 0, kept_in_chunk = 0;
    if (i < p.batch) {
      const KeptTokenCounts counts = count_kept_tokens(p, i);
      num_kept = counts.num_kept;
      p.seq_lens_out[i] = wrap_sub(p.seq_lens[i], counts.num_rejected);
    }
    const int64_t kept_to_here = kept_before_chunk + prefix_sum_over_block(num_kept, warp_sums, &kept_in_chunk);
    if (i < p.batch) p.query_start_loc_out[i + 1] = static_cast<int32_t>(kept_to_here);
    if (thread == 0) kept_before[0] = kept_before_chunk;
    kept_before[thread + 1] = kept_to_here;
    __syncthreads();
    const auto num_requests = static_cast<int32_t>(smaller<int64_t>(kThreads, p.batch - first));
    for (int32_t r = thread / kWarpSize; r < num_requests; r += kWarps) {
      const int64_t begin = kept_before[r];
      const int64_t end = smaller(kept_before[r + 1], p.total_tokens);
      for (int64_t n = begin + thread % kWarpSize; n < end; n += kWarpSize) {
        p.token_indices[n] = wrap_add(p.query_start_loc[first + r], static_cast<int32_t>(n - begin));
      }
    }
    kept_before_chunk += kept_in_chunk;
  }
  for (int64_t n = kept_before_chunk + thread; n < p.total_tokens; n += kThreads) p.token_indices[n] = kNoToken;
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void* stream) {
  return cuda::launch_items(*params, params->batch, stream);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void* stream) {
  return cuda::launch_items(*params, params->batch, stream);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_inputs(const PrepareInputsParams* params, void* stream) {
  return cuda::launch(cuda::prepare_inputs_kernel, {dim3(1), cuda::kThreads}, stream, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_input_ids_(const PrepareInputIdsParams* params, void* stream) {
  return cuda::launch_items<cuda::kWarpSize>(*params, params->batch, stream);
}
