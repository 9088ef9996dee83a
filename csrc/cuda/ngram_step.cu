// CUDA kernel of ngram_step_, which looks up in rows that include their sampled tokens.
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct StepBlock {
  LookupBlock lookup;
  RequestRow row;
  int64_t num_sampled;
};

// All blocks of a request read the sampled tokens from the sampler's tensor, so no block waits for the append.
struct StepLookup {
  const NgramStepParams& p;
  StepBlock& block;

  __device__ int64_t length(int64_t i) const {
    if (is_discarded(p, i) || !is_valid_token(p.sampled_token_ids[i][0], p.vocab_size)) return 0;
    return request_row(p, i).length;
  }
  __device__ RowTokens tokens(int64_t i) const {
    const uint32_t thread = threadIdx.x;
    // A thread of warp 1 reads the row, so that these loads and the loads of warp 0 run in parallel.
    if (thread == kWarpSize) block.row = request_row(p, i);
    if (thread < kWarpSize) {
      const int64_t count =
          count_valid_prefix_by_warp(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.vocab_size);
      if (thread == 0) block.num_sampled = is_discarded(p, i) ? 0 : count;
    }
    __syncthreads();
    const AcceptResult result = accept_tokens(p, i, block.row, block.num_sampled);
    const bool can_draft =
        should_draft(result) && may_draft(result.old_length + result.num_appended, p.token_ids.capacity, p.lookup);
    if (!can_draft) return {p.token_ids.data, p.sampled_token_ids.data, 0, 0};
    return {p.token_ids[result.row], p.sampled_token_ids[i], static_cast<int32_t>(result.old_length),
            static_cast<int32_t>(result.old_length + result.num_appended)};
  }
  // No block reads the row after its old end, so the tokens may be appended before the other blocks are done.
  __device__ void write_results(int64_t i, const RowTokens& tokens, Match match) const {
    // The result is computed again, because keeping it since tokens() would need registers.
    const AcceptResult result = accept_tokens(p, i, block.row, block.num_sampled);
    const uint32_t thread = threadIdx.x;
    write_draft(p, i, tokens, match, padding_token(p, result));
    if (thread < result.num_appended)
      p.token_ids[result.row][result.old_length + thread] = p.sampled_token_ids[i][thread];
    if (thread == 0) {
      p.next_token_ids[i] = result.next_token;
      p.num_sampled[i] = static_cast<int32_t>(result.num_sampled);
    }
  }
  __device__ void finalize(int64_t i) const {
    if (!p.advance || p.num_sampled[i] == 0) return;
    const RequestRow row = request_row(p, i);
    const int64_t num_appended =
        row.row < 0 ? 0 : num_appended_tokens(p.num_sampled[i], row.length, p.token_ids.capacity);
    if (num_appended > 0) p.num_tokens[row.row] = static_cast<int32_t>(row.length + num_appended);
  }
};

__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_step_kernel(const __grid_constant__ NgramStepParams p) {
  __shared__ StepBlock block;
  look_up_all(StepLookup{p, block}, p, block.lookup);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_step__workspace(const NgramStepParams* params) {
  return count_lookup_workspace_words(ngram_step_kernel, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_step_(const NgramStepParams* params, void* stream) {
  return launch_lookup(ngram_step_kernel, *params, stream);
}

}  // namespace ngram_npu::cuda
