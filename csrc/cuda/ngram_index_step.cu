#include "core/ngram_index_step.h"
#include "cuda/ngram_index_drafter.cuh"

namespace ngram_npu::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, kBlocks)
    ngram_index_step_kernel(const __grid_constant__ NgramIndexStepParams p) {
  __shared__ Shared shared;
  const NgramStepParams& s = p.step;
  const int64_t i = blockIdx.x;
  const uint32_t thread = threadIdx.x;
  if (thread < kWarpSize) {
    const bool dropped = discarded(s, i);  // before the run, whose loads need not wait for it
    const int64_t run = leading_run_by_warp(s.sampled_token_ids[i], s.sampled_token_ids.capacity, s.vocab_size);
    if (thread == 0) shared.num_sampled = dropped ? 0 : run;
  }
  const Table table = open_request(s, p.index, i, shared);
  __syncthreads();

  const Accepted a = accept(s, i, shared.live, shared.num_sampled);
  const int64_t length = a.old_length + a.num_appended;
  const bool asks = drafts(a) && can_look_up(length, s.token_ids.capacity);
  const LiveTokens tokens = grown_tokens(s, i, a, asks);
  plan_request(s, p.catch_up_tokens, table, tokens, shared);
  if (thread < a.num_appended) s.token_ids[a.row][a.old_length + thread] = s.sampled_token_ids[i][thread];
  __syncthreads();

  if (thread == 0) {
    s.next_token_ids[i] = a.next_token;
    s.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    if (s.advance && a.num_appended > 0) s.num_tokens[a.row] = static_cast<int32_t>(length);
  }
  draft_request(s, table, i, tokens, shared);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_ngram_index_step__workspace(const NgramIndexStepParams* params) {
  return lookup_workspace(ngram_index_scan_kernel, params->step);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_step_(const NgramIndexStepParams* params, void* stream) {
  return launch_drafter(ngram_index_step_kernel, *params, params->step, stream);
}

}  // namespace ngram_npu::cuda
