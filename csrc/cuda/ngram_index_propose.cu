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
  const bool asks = can_look_up(live.length, lookup.token_ids.capacity);
  const LiveTokens tokens = asks ? whole_row(lookup, live) : LiveTokens{};
  plan_request(lookup, p.catch_up_tokens, table, tokens, shared);
  __syncthreads();
  draft_request(lookup, table, i, tokens, shared);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_index_propose__workspace(const NgramIndexProposeParams* params) {
  return lookup_workspace(ngram_index_scan_kernel, params->propose);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_propose_(const NgramIndexProposeParams* params, void* stream) {
  return launch_drafter(ngram_index_propose_kernel, *params, params->propose, stream);
}

}  // namespace ngram_npu::cuda
