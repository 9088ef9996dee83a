#include "core/correct_spec_state.h"
#include "cuda/counts.cuh"
#include "cuda/slots.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 512;

// Token n's position and slot, from the counts as they were before.
template <class Slot>
__device__ void write_token(const CorrectSpecStateParams& p, int64_t n) {
  const int64_t request = request_of(p.slots.query_start_loc, p.slots.batch, n);
  int64_t position = 0;
  if (request >= 0 && request < p.counts.batch) {
    position = position_of(n, p.slots.query_start_loc[request], corrected(p.counts, request).num_computed);
    if (n < p.slots.num_positions) p.positions[n] = position;
  }
  if (n < p.slots.num_slots) write_slot<Slot>(p.slots, request, n, [&] { return position; });
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

// Whether this block is the last to come here, and so sees what all wrote, and that all have read. `arrived` is 0 again
// afterwards. All threads must call it.
__device__ bool is_last_block(uint32_t* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (gridDim.x == 1) return true;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Every block goes by the counts as they were, and the last one then overwrites them.
template <class Slot>
__global__ void __launch_bounds__(kThreads) correct_spec_state_kernel(const CorrectSpecStateParams p) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  write_token<Slot>(p, n);
  if (n < p.num_seq_lens) write_request(p, n);
  if (!is_last_block(static_cast<uint32_t*>(p.workspace))) return;
  for (int64_t i = threadIdx.x; i < p.counts.batch; i += kThreads) settle_counts(p.counts, i);
}

dim3 grid_for(const CorrectSpecStateParams& p) {
  const int64_t tokens = larger(p.slots.num_slots, p.slots.num_positions);
  return blocks_for(larger(tokens, p.num_seq_lens), kThreads);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_correct_spec_state__workspace(const CorrectSpecStateParams* p) {
  return cuda::grid_for(*p).x > 1 ? kCorrectSpecStateWorkspaceWords : 0;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_correct_spec_state_(const CorrectSpecStateParams* params, void* stream) {
  const CorrectSpecStateParams& p = *params;
  const dim3 grid = cuda::grid_for(p);
  if (grid.x > 1 && p.workspace == nullptr) return kInvalidParams;
  const auto kernel =
      p.slots.slot_bytes == 8 ? cuda::correct_spec_state_kernel<int64_t> : cuda::correct_spec_state_kernel<int32_t>;
  return cuda::launch(kernel, grid, cuda::kThreads, stream, p);
}
