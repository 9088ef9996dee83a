// CUDA kernel of ngram_propose, which looks up in unmodified rows.
#include "core/drafting.h"
#include "cuda/lookup.cuh"

namespace ngram_npu::cuda {
namespace {

struct ProposeLookup {
  const NgramProposeParams& p;

  __device__ int64_t length(int64_t i) const {
    const RequestRow row = request_row(p, i);
    return may_draft(row.length, p.token_ids.capacity, p.lookup) ? row.length : 0;
  }
  __device__ RowTokens tokens(int64_t i) const {
    const RequestRow row = length(i) > 0 ? request_row(p, i) : RequestRow{};
    const auto count = static_cast<int32_t>(row.length);
    return {p.token_ids[row.row], p.token_ids[row.row], count, count};
  }
  __device__ void write_results(int64_t i, const RowTokens& tokens, Match match) const {
    write_draft(p, i, tokens, match, padding_token(p, i));
  }
  __device__ void finalize(int64_t) const {}
};

__global__ void __launch_bounds__(kLookupThreads, kLookupBlocks)
    ngram_propose_kernel(const __grid_constant__ NgramProposeParams p) {
  __shared__ LookupBlock block;
  look_up_all(ProposeLookup{p}, p, block);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_propose_workspace(const NgramProposeParams* params) {
  return count_lookup_workspace_words(ngram_propose_kernel, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_propose(const NgramProposeParams* params, void* stream) {
  return launch_lookup(ngram_propose_kernel, *params, stream);
}

}  // namespace ngram_npu::cuda
