// CUDA kernel of ngram_step_, which looks up in rows that include their sampled tokens.
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

// All blocks of a request read the sampled tokens from the sampler's tensor, so no block waits for the append.
struct StepLookup {
  const NgramStepParams& p;
  LookupBlock& block;

  // With one warp. Also appends the tokens: no block reads the row after its old end.
  __device__ RowTokens read_tokens(int64_t i) const {
    const int32_t* const sampled_tokens = p.sampled_token_ids[i];
    const auto lane = static_cast<int32_t>(threadIdx.x);
    const auto load_sampled_token = [&](int32_t n) {
      return n < p.sampled_token_ids.capacity ? sampled_tokens[n] : kNoToken;
    };
    // The first loads do not depend on each other.
    const int32_t first_token = load_sampled_token(lane);
    const bool discarded = is_discarded(p, i);
    const RequestRow row = request_row(p, i);
    int32_t num_valid = 0;
    for (int32_t token = first_token;; token = load_sampled_token(num_valid + lane)) {
      const int32_t num_more = count_leading_lanes(is_valid_token(token, p.lookup.vocab_size));
      num_valid += num_more;
      if (num_more < kWarpSize) break;
    }
    const int64_t num_sampled = discarded ? 0 : num_valid;
    const AcceptResult accepted = accept_tokens(p, i, row, num_sampled);
    if (blockIdx.y == 0 && lane < accepted.num_appended) {
      int32_t* const row_end = p.token_ids[row.row] + row.length;
      row_end[lane] = first_token;
#pragma unroll 1
      for (int64_t n = lane + kWarpSize; n < accepted.num_appended; n += kWarpSize) row_end[n] = sampled_tokens[n];
    }
    if (lane == 0) {
      block.row = row;
      block.num_sampled = num_sampled;
    }
    const int64_t length = accepted.old_length + accepted.num_appended;
    if (!should_draft(accepted) || !may_draft(length, p.token_ids.capacity, p.lookup))
      return {p.token_ids.data, p.sampled_token_ids.data, 0, 0};
    return {p.token_ids[row.row], sampled_tokens, static_cast<int32_t>(row.length), static_cast<int32_t>(length)};
  }
  __device__ int32_t newest_token(int64_t i) const { return next_token(p, i, block.row, block.num_sampled); }
  __device__ void write_results(int64_t i, const RowTokens& tokens, Match match) const {
    const AcceptResult accepted{block.row.row, block.row.length, block.num_sampled, 0, block.newest_token};
    write_draft(p, i, tokens, match, padding_token(p, accepted));
    if (threadIdx.x == 0) {
      p.next_token_ids[i] = accepted.next_token;
      p.num_sampled[i] = static_cast<int32_t>(accepted.num_sampled);
    }
  }
  __device__ void grow_row(int64_t i) const {
    const AcceptResult accepted = accept_tokens(p, i, block.row, block.num_sampled);
    if (p.advance && accepted.num_appended > 0)
      p.num_tokens[accepted.row] = static_cast<int32_t>(accepted.old_length + accepted.num_appended);
  }
};

__global__ void __launch_bounds__(kMaxLookupThreads, kLookupBlocks)
    ngram_step_kernel(const __grid_constant__ NgramStepParams p) {
  __shared__ LookupBlock block;
  look_up(StepLookup{p, block}, p, block);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_step__workspace(const NgramStepParams* params) {
  return count_lookup_workspace_words(ngram_step_kernel, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_step_(const NgramStepParams* params, void* stream) {
  return launch_lookup(ngram_step_kernel, *params, stream);
}

}  // namespace ngram_npu::cuda
