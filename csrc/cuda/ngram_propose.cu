#include "core/ngram_propose.h"
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct ProposeLookup {
  const NgramProposeParams& p;

  __device__ int64_t length(int64_t i) const {
    const LiveRow live = live_row(p, i);
    return may_draft(live.length, p.token_ids.capacity, p.lookup) ? live.length : 0;
  }
  __device__ LiveTokens tokens(int64_t i) const {
    const auto count = static_cast<int32_t>(length(i));
    return {count > 0 ? p.token_ids[live_row(p, i).row] : p.token_ids.data, p.token_ids.data, count, count};
  }
  __device__ void finish(int64_t i, const LiveTokens& tokens, Occurrence found) const {
    write_draft(tokens, found, p.lookup, unused_token(p, i), p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i,
                p.match_len + i);
  }
  __device__ void settle(int64_t) const {}
};

__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_propose_kernel(const __grid_constant__ NgramProposeParams p) {
  __shared__ LookupBlock block;
  look_up_all(ProposeLookup{p}, p, block);
}

dim3 grid_for(const NgramProposeParams& p) { return lookup_grid(ngram_propose_kernel, p.batch, p.token_ids.capacity); }

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_propose_workspace(const NgramProposeParams* p) {
  return cuda::grid_for(*p).x > 1 ? lookup_workspace_words(p->batch) : 0;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_propose(const NgramProposeParams* params, void* stream) {
  const NgramProposeParams& p = *params;
  const dim3 grid = cuda::grid_for(p);
  if (grid.x == 0 || (grid.x > 1 && p.workspace == nullptr)) return kInvalidParams;
  return cuda::launch(cuda::ngram_propose_kernel, grid, cuda::kLookupThreads, stream, p);
}
