#include "core/correct_spec_state.h"
#include "cuda/spec_state.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 1024;

// Where each request begins and what is computed of it, of a batch that a block can hold: tokens look both up.
struct Requests {
  int32_t starts[kThreads + 1];
  int32_t num_computed[kThreads];
  bool last;
};

// Token n's position and slot, from the counts as they were before.
__device__ void write_token(const CorrectSpecStateParams& p, const Requests& held, bool holds, int64_t n) {
  const int32_t* starts = p.slots.query_start_loc;
  const int64_t batch = p.slots.batch;
  const int64_t request = holds ? request_of(held.starts, batch, n) : request_of(starts, batch, n);
  int64_t position = 0;
  if (request >= 0 && request < batch) {
    position = holds ? position_of(n, held.starts[request], held.num_computed[request])
                     : position_of(n, starts[request], corrected(p.counts, request).num_computed);
    if (n < p.slots.num_positions) p.positions[n] = position;
  }
  if (n < p.slots.num_slots) write_slot(p.slots, request, n, [&] { return position; });
}

__device__ void write_request(const CorrectSpecStateParams& p, int64_t i) {
  if (i >= p.counts.batch) {
    p.seq_lens[i] = 0;
    return;
  }
  const CorrectedCounts counts = corrected(p.counts, i);
  const int32_t seq_len = seq_len_of(p, i, counts.num_computed);
  p.seq_lens[i] = seq_len;
  if (p.discard != nullptr) p.discard[i] = discards(p, i, seq_len);
  stage_counts(p.counts, i, counts);
}

// Every block goes by the counts as they were, and the last one then overwrites them.
__global__ void __launch_bounds__(kThreads, 1) correct_spec_state_kernel(const CorrectSpecStateParams p) {
  __shared__ Requests held;
  const int64_t thread = threadIdx.x, n = int64_t{blockIdx.x} * kThreads + thread;
  const bool holds = p.slots.batch <= kThreads;
  if (holds && thread < p.slots.batch) {
    held.starts[thread + 1] = p.slots.query_start_loc[thread + 1];
    held.num_computed[thread] = corrected(p.counts, thread).num_computed;
  }
  if (thread == 0) held.starts[0] = p.slots.query_start_loc[0];
  __syncthreads();
  write_token(p, held, holds, n);
  if (n < p.num_seq_lens) write_request(p, n);
  if (!is_last_block(static_cast<uint32_t*>(p.workspace), &held.last)) return;
  for (int64_t i = thread; i < p.counts.batch; i += kThreads) settle_counts(p.counts, i);
  if (gridDim.x > 1 && thread == 0) *static_cast<uint32_t*>(p.workspace) = 0;
}

dim3 grid_for(const CorrectSpecStateParams& p) {
  const int64_t tokens = larger(p.slots.num_slots, p.slots.num_positions);
  return blocks_for(larger(tokens, p.num_seq_lens), kThreads);
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_correct_spec_state__workspace(const CorrectSpecStateParams* p) {
  return grid_for(*p).x > 1 ? kCorrectSpecStateWorkspaceWords : 0;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_correct_spec_state_(const CorrectSpecStateParams* params, void* stream) {
  const CorrectSpecStateParams& p = *params;
  const dim3 grid = grid_for(p);
  if (grid.x > 1 && p.workspace == nullptr) return kInvalidParams;
  return launch(correct_spec_state_kernel, grid, kThreads, stream, p);
}

}  // namespace ngram_npu::cuda
