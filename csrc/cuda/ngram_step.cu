// CUDA kernel of ngram_step_: the lookup in rows that include their sampled tokens.
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct StepBlock {
  LookupBlock lookup;
  RequestRow valid;
  int64_t num_sampled;
};

// All blocks of a request read the sampled tokens from the sampler's tensor, so that no block waits for the append.
struct StepLookup {
  const NgramStepParams& p;
  StepBlock& block;

  __device__ int64_t length(int64_t i) const {
    if (is_discarded(p, i) || !is_valid_token(p.sampled_token_ids[i][0], p.vocab_size)) return 0;
    return request_row(p, i).length;
  }
  __device__ RowTokens tokens(int64_t i) const {
    const uint32_t thread = threadIdx.x;
    // A thread of warp 1, so that these loads and those of warp 0 run in parallel.
    if (thread == kWarpSize) block.valid = request_row(p, i);
    if (thread < kWarpSize) {
      const int64_t count =
          count_valid_prefix_by_warp(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.vocab_size);
      if (thread == 0) block.num_sampled = is_discarded(p, i) ? 0 : count;
    }
    __syncthreads();
    const Accepted a = accept_tokens(p, i, block.valid, block.num_sampled);
    const bool can_draft = should_draft(a) && may_draft(a.old_length + a.num_appended, p.token_ids.capacity, p.lookup);
    if (!can_draft) return {p.token_ids.data, p.sampled_token_ids.data, 0, 0};
    return {p.token_ids[a.row], p.sampled_token_ids[i], static_cast<int32_t>(a.old_length),
            static_cast<int32_t>(a.old_length + a.num_appended)};
  }
  // No block reads the row after its old end, so the tokens may be appended before the other blocks are done.
  __device__ void finish(int64_t i, const RowTokens& tokens, Match match) const {
    // Computed again, because keeping it would need registers.
    const Accepted a = accept_tokens(p, i, block.valid, block.num_sampled);
    const uint32_t thread = threadIdx.x;
    write_draft(p, i, tokens, match, padding_token(p, a));
    if (thread < a.num_appended) p.token_ids[a.row][a.old_length + thread] = p.sampled_token_ids[i][thread];
    if (thread == 0) {
      p.next_token_ids[i] = a.next_token;
      p.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    }
  }
  __device__ void finalize(int64_t i) const {
    if (!p.advance || p.num_sampled[i] == 0) return;
    const RequestRow valid = request_row(p, i);
    const int64_t num_appended =
        valid.row < 0 ? 0 : num_appended_tokens(p.num_sampled[i], valid.length, p.token_ids.capacity);
    if (num_appended > 0) p.num_tokens[valid.row] = static_cast<int32_t>(valid.length + num_appended);
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
