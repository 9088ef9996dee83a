#include "core/ngram_index_step.h"
#include "cuda/ngram_index_drafter.cuh"

namespace ngram_npu::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 3) ngram_index_step_kernel(const __grid_constant__ NgramIndexStepParams p) {
  __shared__ Shared shared;
  const NgramStepParams& s = p.step;
  const int64_t i = blockIdx.x;
  const uint32_t thread = threadIdx.x;
  const Table table = open_table_for(s, p.index);
  if (thread == kWarpSize) shared.live = live_row(s, i);  // beside warp 0, whose loads need not wait for these
  if (thread < kWarpSize) {
    const int64_t run = leading_run_by_warp(s.sampled_token_ids[i], s.sampled_token_ids.capacity, s.vocab_size);
    if (thread == 0) shared.num_sampled = discarded(s, i) ? 0 : run;
  }
  __syncthreads();

  const Accepted a = accept(s, i, shared.live, shared.num_sampled);
  const int64_t length = a.old_length + a.num_appended;
  const GrownRow grown{a.row, length, a.num_appended, drafts(a) && can_look_up(length, s.token_ids.capacity)};
  plan_request(s, p.index, p.catch_up_tokens, table, i, grown, shared);
  if (thread < a.num_appended) s.token_ids[a.row][a.old_length + thread] = s.sampled_token_ids[i][thread];
  __syncthreads();

  if (thread == 0) {
    s.next_token_ids[i] = a.next_token;
    s.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    if (s.advance && a.num_appended > 0) s.num_tokens[a.row] = static_cast<int32_t>(length);
  }
  draft_request(s, p.index, table, i, grown, shared);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_step_(const NgramIndexStepParams* params, void* stream) {
  const int64_t batch = params->step.batch;
  if (batch < 1 || batch > INT32_MAX) return kInvalidParams;
  return cuda::launch(cuda::ngram_index_step_kernel, dim3(static_cast<uint32_t>(batch)), cuda::kThreads, stream,
                      *params);
}
