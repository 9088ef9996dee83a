#include "core/prepare_input_ids.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kWarps = kThreads / kWarpSize;

// One warp a request.
__global__ void __launch_bounds__(kThreads) prepare_input_ids_kernel(const PrepareInputIdsParams p) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (i >= p.batch) return;
  const int64_t prev = p.prev_positions[i];
  if (!p.draft_token_ids.has(prev)) return;
  const InputSpan span = input_span(p, i);
  for (int64_t n = span.begin + threadIdx.x % kWarpSize; n < span.end; n += kWarpSize) {
    p.input_ids[n] = input_id(p, span, prev, n);
  }
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_input_ids_(const PrepareInputIdsParams* params, void* stream) {
  const dim3 grid = cuda::blocks_for(params->batch, cuda::kWarps);
  return cuda::launch(cuda::prepare_input_ids_kernel, grid, cuda::kThreads, stream, *params);
}
