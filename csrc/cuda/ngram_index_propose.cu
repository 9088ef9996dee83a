#include "core/ngram_index_propose.h"
#include "cuda/ngram_index_drafter.cuh"

namespace ngram_npu::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 3)
    ngram_index_propose_kernel(const __grid_constant__ NgramIndexProposeParams p) {
  __shared__ Shared shared;
  const NgramProposeParams& lookup = p.propose;
  const int64_t i = blockIdx.x;
  const Table table = open_table_for(lookup, p.index);
  if (threadIdx.x == 0) shared.live = live_row(lookup, i);
  __syncthreads();
  const LiveRow live = shared.live;
  const GrownRow grown{live.row, live.length, 0, can_look_up(live.length, lookup.token_ids.capacity)};
  plan_request(lookup, p.index, p.catch_up_tokens, table, i, grown, shared);
  __syncthreads();
  draft_request(lookup, p.index, table, i, grown, shared);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_propose_(const NgramIndexProposeParams* params, void* stream) {
  const int64_t batch = params->propose.batch;
  if (batch < 1 || batch > INT32_MAX) return kInvalidParams;
  return cuda::launch(cuda::ngram_index_propose_kernel, dim3(static_cast<uint32_t>(batch)), cuda::kThreads, stream,
                      *params);
}
