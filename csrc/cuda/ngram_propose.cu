#include "core/ngram_propose.h"
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_propose_kernel(const __grid_constant__ NgramProposeParams p) {
  __shared__ LookupBlock block;
  __shared__ LiveRow live_of_block;
  const int64_t i = blockIdx.x;
  if (threadIdx.x == 0) live_of_block = live_row(p, i);
  __syncthreads();
  const LiveRow live = live_of_block;
  LiveTokens tokens{p.token_ids.data, p.token_ids.data, 0, 0};
  if (may_draft(live.length, p.token_ids.capacity, p.lookup)) {
    const auto length = static_cast<int32_t>(live.length);
    tokens = {p.token_ids[live.row], p.token_ids.data, length, length};
  }
  search_tiles(tokens, p.lookup, static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y), block);
  if (!join_blocks(p.workspace, block)) return;
  write_draft(tokens, occurrence_of(block.best, tokens, p.lookup), p.lookup, unused_token(p, i),
              p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i, p.match_len + i);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_propose_workspace(const NgramProposeParams* p) {
  return cuda::workspace_words(p->batch, p->token_ids.capacity);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_propose(const NgramProposeParams* params, void* stream) {
  const NgramProposeParams& p = *params;
  if (p.batch < 1 || p.batch > INT32_MAX) return kInvalidParams;
  const dim3 grid = cuda::lookup_grid(p.batch, p.token_ids.capacity, p.workspace);
  return cuda::launch(cuda::ngram_propose_kernel, grid, cuda::kLookupThreads, stream, p);
}
