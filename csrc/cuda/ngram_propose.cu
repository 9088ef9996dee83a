// CUDA kernel of ngram_propose, which reads the rows and appends nothing.
#include "core/drafting.h"
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct ProposeLookup {
  const NgramProposeParams& p;
  LookupBlock& block;

  __device__ RowTokens read_tokens(int64_t i) const {
    const RequestRow assigned = assigned_row(p, i);
    const int32_t num_sampled = num_new_tokens(p, i);
    if (threadIdx.x == 0) block.row = assigned;
    if (num_sampled <= 0 || !may_draft(assigned.length, p.token_ids.capacity, p.lookup))
      return {p.token_ids.data, p.token_ids.data, 0, 0};
    const auto count = static_cast<int32_t>(assigned.length);
    return {p.token_ids[assigned.row], p.token_ids[assigned.row], count, count};
  }
  __device__ int32_t newest_token(int64_t) const { return padding_token(p, block.row); }
  __device__ void write_results(int64_t i, const RowTokens& tokens, Match match) const {
    write_draft(p, i, tokens, match, block.newest_token);
  }
  __device__ void grow_row(int64_t) const {}
};

__global__ void __launch_bounds__(kMaxLookupThreads, kLookupBlocks)
    ngram_propose_kernel(const __grid_constant__ NgramProposeParams p) {
  __shared__ LookupBlock block;
  look_up(ProposeLookup{p, block}, p, block);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_propose_workspace(const NgramProposeParams* params) {
  return count_lookup_workspace_words(ngram_propose_kernel, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_propose(const NgramProposeParams* params, void* stream) {
  return launch_lookup(ngram_propose_kernel, *params, stream);
}

}  // namespace ngram_npu::cuda
