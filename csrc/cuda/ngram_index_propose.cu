#include "core/ngram_index_propose.h"
#include "cuda/ngram_index_drafter.cuh"

namespace ngram_npu::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, kBlocks)
    ngram_index_propose_kernel(const __grid_constant__ NgramIndexProposeParams p) {
  __shared__ Shared shared;
  const NgramProposeParams& lookup = p.propose;
  const int64_t i = blockIdx.x;
  const Table table = open_request(lookup, p.index, i, shared);
  __syncthreads();
  const LiveRow live = shared.live;
  GrownRow grown{live.row, {lookup.token_ids.data, lookup.token_ids.data, 0, 0}, 0, false};
  if (can_look_up(live.length, lookup.token_ids.capacity)) {
    const auto length = static_cast<int32_t>(live.length);
    grown.tokens = {lookup.token_ids[live.row], lookup.token_ids.data, length, length};
    grown.asks = true;
  }
  plan_request(lookup, p.catch_up_tokens, table, grown, shared);
  __syncthreads();
  draft_request(lookup, table, i, grown, shared);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_index_propose__workspace(const NgramIndexProposeParams* params) {
  return cuda::scan_workspace(params->propose);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_propose_(const NgramIndexProposeParams* params, void* stream) {
  return cuda::launch_drafter(cuda::ngram_index_propose_kernel, *params, params->propose, stream);
}
