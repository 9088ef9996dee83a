// CUDA kernels of the operators that correct counts, positions and slots between two forward passes.
#include "core/correction.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 1024;

// Stores a request's new num_computed_tokens in the request's num_accepted_tokens, which no thread reads, until all
// requests have read the old counts. The batch size is therefore not limited, and no other memory is needed.
__device__ void stage_counts(const CorrectNumComputedTokensParams& p, int64_t i, const CorrectedCounts& counts) {
  if (counts.changes_accepted) p.num_accepted_tokens[i] = counts.num_computed;
}

// Writes the final counts. Must be called after the counts of all requests have been stored.
__device__ void write_counts(const CorrectNumComputedTokensParams& p, int64_t i) {
  const int64_t prev_position = prev_position_with_drafts(p, i);
  if (prev_position < 0) {
    p.num_computed_tokens[i] = p.host_num_computed_tokens[i];
  } else {
    p.num_computed_tokens[i] = p.num_accepted_tokens[i];
    p.num_accepted_tokens[i] = limited_num_sampled(p, prev_position);
  }
}

// Finds the request of token n; -1 before the first request, `batch` after the last. The result is in the range
// [-1, batch] for any offsets. The tokens, not the requests, are divided among the threads, so each thread must find
// the request of its token.
__device__ int64_t find_request(const int32_t* query_start_loc, int64_t batch, int64_t n) {
  int64_t low = 0, high = batch + 1;  // the first offset above n lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (query_start_loc[middle] > n) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low - 1;
}

// Writes the slot of token n of `request`, or the padding. get_position() returns the token's position.
template <class GetPosition>
__device__ void write_slot(const ComputeSlotMappingParams& p, int64_t request, int64_t n,
                           const GetPosition& get_position) {
  if (request < 0) return;
  int64_t slot = kNoSlot;
  if (request < p.batch && n < p.num_positions) {
    slot = slot_run(p.layout, blocks_of(p.block_table, p.row_indices[request]), get_position()).slot;
  }
  if (slot == kNoSlot) slot = p.pad_id;
  if (p.slot_bytes == 8) {
    static_cast<int64_t*>(p.slot_mapping)[n] = slot;
  } else {
    static_cast<int32_t*>(p.slot_mapping)[n] = static_cast<int32_t>(slot);
  }
}

// Uses one block, so that a barrier separates reading the old counts from writing the new counts.
__global__ void __launch_bounds__(kThreads) correct_num_computed_tokens_kernel(const CorrectNumComputedTokensParams p) {
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) stage_counts(p, i, corrected_counts(p, i));
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.batch; i += kThreads) write_counts(p, i);
}

// Shared memory of a block: first token and corrected num_computed_tokens of each request, for a batch with at most one
// request per thread.
struct StagedRequests {
  int32_t starts[kThreads + 1];
  int32_t num_computed[kThreads];
  bool is_last;  // see is_last_block()
};

// Writes the position and slot of token n, from the counts before the correction.
__device__ void write_token(const CorrectSpecStateParams& p, const StagedRequests& staged, bool is_staged, int64_t n) {
  const int32_t* starts = p.slots.query_start_loc;
  const int64_t batch = p.slots.batch;
  const int64_t request = is_staged ? find_request(staged.starts, batch, n) : find_request(starts, batch, n);
  int64_t position = 0;
  if (request >= 0 && request < batch) {
    position = is_staged ? position_of_token(n, staged.starts[request], staged.num_computed[request])
                         : position_of_token(n, starts[request], corrected_counts(p.counts, request).num_computed);
    if (n < p.slots.num_positions) p.positions[n] = position;
  }
  if (n < p.slots.num_slots) write_slot(p.slots, request, n, [&] { return position; });
}

__device__ void write_request(const CorrectSpecStateParams& p, int64_t i) {
  if (i >= p.counts.batch) {
    p.seq_lens[i] = 0;
    return;
  }
  const CorrectedCounts counts = corrected_counts(p.counts, i);
  const int32_t seq_len = sequence_length(p.slots.query_start_loc, i, counts.num_computed);
  p.seq_lens[i] = seq_len;
  if (p.discard != nullptr) p.discard[i] = should_discard(p, i, seq_len);
  stage_counts(p.counts, i, counts);
}

// Every block uses the counts before the correction; the last block then overwrites these counts.
__global__ void __launch_bounds__(kThreads, 1) correct_spec_state_kernel(const CorrectSpecStateParams p) {
  __shared__ StagedRequests staged;
  const int64_t thread = threadIdx.x, n = int64_t{blockIdx.x} * kThreads + thread;
  const bool is_staged = p.slots.batch <= kThreads;
  if (is_staged && thread < p.slots.batch) {
    staged.starts[thread + 1] = p.slots.query_start_loc[thread + 1];
    staged.num_computed[thread] = corrected_counts(p.counts, thread).num_computed;
  }
  if (thread == 0) staged.starts[0] = p.slots.query_start_loc[0];
  __syncthreads();
  write_token(p, staged, is_staged, n);
  if (n < p.num_seq_lens) write_request(p, n);
  if (!is_last_block(static_cast<uint32_t*>(p.workspace), &staged.is_last)) return;
  for (int64_t i = thread; i < p.counts.batch; i += kThreads) write_counts(p.counts, i);
}

dim3 make_grid(const CorrectSpecStateParams& p) {
  const int64_t tokens = larger(p.slots.num_slots, p.slots.num_positions);
  return blocks_for(larger(tokens, p.num_seq_lens), kThreads);
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_correct_num_computed_tokens_(const CorrectNumComputedTokensParams* params,
                                                                     void* stream) {
  return launch(correct_num_computed_tokens_kernel, {dim3(1), kThreads}, stream, *params);
}

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_correct_spec_state__workspace(const CorrectSpecStateParams* p) {
  return make_grid(*p).x > 1 ? kCorrectSpecStateWorkspaceWords : 0;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_correct_spec_state_(const CorrectSpecStateParams* params, void* stream) {
  const CorrectSpecStateParams& p = *params;
  const dim3 grid = make_grid(p);
  if (grid.x > 1) {
    const int32_t status = zero_workspace(p.workspace, kCorrectSpecStateWorkspaceWords, stream);
    if (status != kOk) return status;
  }
  return launch(correct_spec_state_kernel, {grid, kThreads}, stream, p);
}

}  // namespace ngram_npu::cuda

namespace ngram_npu {

static __device__ void write_item(const ComputeSlotMappingParams& p, int64_t n) {
  cuda::write_slot(p, cuda::find_request(p.query_start_loc, p.batch, n), n, [&] { return p.positions[n]; });
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_compute_slot_mapping_(const ComputeSlotMappingParams* params, void* stream) {
  return cuda::launch_items(*params, params->num_slots, stream);
}

}  // namespace ngram_npu
