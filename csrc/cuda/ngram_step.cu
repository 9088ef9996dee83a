// CUDA kernel of ngram_step_, called by its body (api/drafting.h): the lookup over rows and their sampled tokens.
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct StepBlock {
  LookupBlock lookup;
  LiveRow live;
  int64_t num_sampled;
};

// All blocks of a request read the sampled tokens from the sampler's tensor, so that none waits for the append.
struct StepLookup {
  const NgramStepParams& p;
  StepBlock& block;

  __device__ int64_t length(int64_t i) const {
    if (discarded(p, i) || !is_valid_token(p.sampled_token_ids[i][0], p.vocab_size)) return 0;
    return live_row(p, i).length;
  }
  __device__ LiveTokens tokens(int64_t i) const {
    const uint32_t thread = threadIdx.x;
    if (thread == kWarpSize) block.live = live_row(p, i);  // in parallel to warp 0: its loads need not wait for these
    if (thread < kWarpSize) {
      const int64_t run = leading_run_by_warp(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.vocab_size);
      if (thread == 0) block.num_sampled = discarded(p, i) ? 0 : run;
    }
    __syncthreads();
    const Accepted a = accept(p, i, block.live, block.num_sampled);
    const bool asks = drafts(a) && may_draft(a.old_length + a.num_appended, p.token_ids.capacity, p.lookup);
    if (!asks) return {p.token_ids.data, p.sampled_token_ids.data, 0, 0};
    return {p.token_ids[a.row], p.sampled_token_ids[i], static_cast<int32_t>(a.old_length),
            static_cast<int32_t>(a.old_length + a.num_appended)};
  }
  // No block reads the row's end, so it may be written before the others are done.
  __device__ void finish(int64_t i, const LiveTokens& tokens, Occurrence match) const {
    const Accepted a = accept(p, i, block.live, block.num_sampled);  // computed again: keeping it would cost registers
    const uint32_t thread = threadIdx.x;
    write_draft(p, i, tokens, match, unused_token(p, a));
    if (thread < a.num_appended) p.token_ids[a.row][a.old_length + thread] = p.sampled_token_ids[i][thread];
    if (thread == 0) {
      p.next_token_ids[i] = a.next_token;
      p.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    }
  }
  __device__ void settle(int64_t i) const {
    if (!p.advance || p.num_sampled[i] == 0) return;
    const LiveRow live = live_row(p, i);
    const int64_t taken = live.row < 0 ? 0 : appended(p.num_sampled[i], live.length, p.token_ids.capacity);
    if (taken > 0) p.num_tokens[live.row] = static_cast<int32_t>(live.length + taken);
  }
};

__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_step_kernel(const __grid_constant__ NgramStepParams p) {
  __shared__ StepBlock block;
  look_up_all(StepLookup{p, block}, p, block.lookup);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_step__workspace(const NgramStepParams* params) {
  return lookup_workspace(ngram_step_kernel, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_step_(const NgramStepParams* params, void* stream) {
  return launch_lookup(ngram_step_kernel, *params, stream);
}

}  // namespace ngram_npu::cuda
