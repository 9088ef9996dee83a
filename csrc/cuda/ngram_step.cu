#include "core/ngram_step.h"
#include "cuda/lookup.cuh"
#include "cuda/sampled.cuh"

namespace ngram_npu::cuda {
namespace {

__device__ LiveTokens tokens_of(const NgramStepParams& p, int64_t i, const Accepted& a) {
  const int64_t length = a.old_length + a.num_appended;
  if (!drafts(a) || !may_draft(length, p.token_ids.capacity, p.lookup)) {
    return {p.token_ids.data, p.sampled_token_ids.data, 0, 0};
  }
  return {p.token_ids[a.row], p.sampled_token_ids[i], static_cast<int32_t>(a.old_length), static_cast<int32_t>(length)};
}

// All blocks of a request read the sampled tokens where the sampler left them, so that
// nobody waits for the append, and the last one may append: nobody reads the row's end or its length any more.
__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_step_kernel(const __grid_constant__ NgramStepParams p) {
  __shared__ LookupBlock block;
  __shared__ LiveRow live_of_block;
  __shared__ int64_t run_of_block;
  const int64_t i = blockIdx.x;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == kWarpSize) live_of_block = live_row(p, i);  // beside warp 0, whose loads need not wait for these
  if (thread < kWarpSize) {
    const int64_t run = leading_run_by_warp(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.vocab_size);
    if (thread == 0) run_of_block = discarded(p, i) ? 0 : run;
  }
  __syncthreads();
  const LiveTokens tokens = tokens_of(p, i, accept(p, i, live_of_block, run_of_block));
  search_tiles(tokens, p.lookup, static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y), block);
  if (!join_blocks(p.workspace, block)) return;

  const Accepted a = accept(p, i, live_of_block, run_of_block);  // again: held all along it costs registers
  write_draft(tokens, occurrence_of(block.best, tokens, p.lookup), p.lookup, unused_token(p, i),
              p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i, p.match_len + i);
  if (thread < a.num_appended) p.token_ids[a.row][a.old_length + thread] = p.sampled_token_ids[i][thread];
  if (thread == 0) {
    p.next_token_ids[i] = a.next_token;
    p.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    if (p.advance && a.num_appended > 0) p.num_tokens[a.row] = static_cast<int32_t>(a.old_length + a.num_appended);
  }
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_step__workspace(const NgramStepParams* p) {
  return cuda::workspace_words(p->batch, p->token_ids.capacity);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_step_(const NgramStepParams* params, void* stream) {
  const NgramStepParams& p = *params;
  if (p.batch < 1 || p.batch > INT32_MAX) return kInvalidParams;
  const dim3 grid = cuda::lookup_grid(p.batch, p.token_ids.capacity, p.workspace);
  return cuda::launch(cuda::ngram_step_kernel, grid, cuda::kLookupThreads, stream, p);
}
