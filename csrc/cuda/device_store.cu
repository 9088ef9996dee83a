// CUDA kernels of the device store's operators.
//
// An append has two launches. The first one, of one block, only reads the store: it decides which blocks each request
// continues and assigns new ones in the order of the batch, so that ranks that run the same step assign the same
// blocks. The second one only writes it, reading what the first one decided. A lookup is a launch of its own; the order
// of launches is the only order that the operators need.
#include "core/device_store.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

using namespace device_store;

constexpr int32_t kPlanThreads = 256;
constexpr int32_t kAppendThreads = 128;
constexpr int32_t kProposeThreads = 64;
constexpr int32_t kProposeWarps = kProposeThreads / kWarpSize;

struct PlanBlock {
  int32_t num_reserved;
  int64_t warp_sums[kPlanThreads / kWarpSize];
};

// A thread plans consecutive requests, so that sums over the threads are in the order of the batch.
__global__ void __launch_bounds__(kPlanThreads)
    device_store_plan_kernel(const __grid_constant__ DeviceStoreAppendParams p) {
  __shared__ PlanBlock block;
  auto* const appends = static_cast<DeviceStoreAppend*>(p.workspace);
  const int64_t per_thread = (p.batch + kPlanThreads - 1) / kPlanThreads;
  const int64_t first = smaller<int64_t>(threadIdx.x * per_thread, p.batch);
  const int64_t stop = smaller(first + per_thread, p.batch);
  int64_t num_needed = 0, total = 0;
  if (threadIdx.x == 0) block.num_reserved = 0;
  for (int64_t i = first; i < stop; ++i) {
    appends[i] = begin_append(p, i);
    num_needed += blocks_for_tokens(appends[i].count);
  }
  const int64_t reserved_before = prefix_sum_over_block(num_needed, block.warp_sums, &total) - num_needed;

  const int64_t limit = max_new_blocks(p);
  int64_t reserved = reserved_before, num_reserved = 0;
  for (int64_t i = first; i < stop; ++i) {
    reserved += blocks_for_tokens(appends[i].count);
    if (reserved <= limit) num_reserved = reserved;
  }
  if (num_reserved > 0) atomicMax(&block.num_reserved, static_cast<int32_t>(num_reserved));
  __syncthreads();

  int64_t num_blocks = 0;
  reserved = reserved_before;
  for (int64_t i = first; i < stop; ++i) {
    reserved += blocks_for_tokens(appends[i].count);
    plan_blocks(p, reserved, block.num_reserved, &appends[i]);
    num_blocks += appends[i].num_blocks;
  }
  const int64_t blocks_before = prefix_sum_over_block(num_blocks, block.warp_sums, &total) - num_blocks;
  auto next = static_cast<int32_t>(next_number(p) + blocks_before);
  for (int64_t i = first; i < stop; ++i) {
    // The second launch zeroes what is written here, but not for requests that store nothing.
    if (appends[i].num_blocks > 0) appends[i].first_block = next;
    next += appends[i].num_blocks;
  }
  if (threadIdx.x == 0) p.allocator[kPlannedNumber] = static_cast<int32_t>(next_number(p) + total);
}

// One block per request.
__global__ void __launch_bounds__(kAppendThreads)
    device_store_append_kernel(const __grid_constant__ DeviceStoreAppendParams p) {
  const int64_t i = blockIdx.x;
  const auto thread = static_cast<int64_t>(threadIdx.x);
  DeviceStoreAppend& planned = static_cast<DeviceStoreAppend*>(p.workspace)[i];
  const DeviceStoreAppend append = planned;
  if (i == 0 && thread == 0) p.allocator[kNextNumber] = p.allocator[kPlannedNumber];
  if (append.is_active == 0) return;
  const int64_t row = p.row_indices[i], scope = scope_of(p.scopes, i);
  const uint64_t seed = seed_of_scope(scope);
  for (int64_t j = thread; j < append.num_blocks; j += kAppendThreads) write_head(p, append, scope, j);
  for (int64_t t = thread; t < append.count; t += kAppendThreads) write_token(p, append, row, t);
  for (int64_t item = thread; item < append.count * kSizes; item += kAppendThreads) {
    const int64_t t = item / kSizes;
    int32_t* const entry = find_entry(p, append, row, seed, t, item % kSizes);
    if (entry != nullptr) atomicMax(entry, position_of(append, t));
  }
  if (thread == 0) finish_append(p, append, i);
  __syncthreads();
  if (thread == 0) planned = DeviceStoreAppend{};
}

// One warp per request. Lane n - 1 looks up the n-gram of the row's last n tokens; all lanes then compare the tokens,
// the longest n-gram first.
__global__ void __launch_bounds__(kProposeThreads)
    device_store_propose_kernel(const __grid_constant__ DeviceStoreProposeParams p) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t i = int64_t{blockIdx.x} * kProposeWarps + threadIdx.x / kWarpSize;
  if (i >= p.batch) return;
  const Query query = query_of(p, i);
  if (query.length == 0) return;
  const int32_t own_length = p.match_len[i];
  const bool has_token = lane < smaller<int64_t>(query.length, kMaxSize);
  const int32_t token = has_token ? query.end[-1 - lane] : 0;
  uint64_t power = 1;
  for (int32_t j = 0; j < lane; ++j) power *= store::kHashBase;
  const auto gram = prefix_sum_over_warp(static_cast<unsigned long long>(static_cast<uint32_t>(token) * power));

  const int32_t lane_level = level_of_size(lane + 1);
  int32_t position = 0;
  if (has_token && lane_level >= 0 && lane + 1 > own_length) {
    const uint64_t seed = seed_of_scope(query.scope);
    position = p.contents.table[lane_level][table_column(gram, seed, lane_level, p.contents.table.capacity)];
  }
  for (int32_t level = kSizes - 1; level >= 0; --level) {
    const int32_t n = size_of_level(level);
    const int32_t entry = __shfl_sync(kWholeWarp, position, n - 1);
    if (entry <= 0) continue;
    const Occurrence found = find_occurrence(p.contents, entry, n, query.scope);
    if (found.row < 0) continue;
    const bool differs = lane < n && gram_token(p.contents, found, lane) != token;
    if (__any_sync(kWholeWarp, differs)) continue;
    const Continuation draft = find_continuation(p.contents, found, query);
    // All lanes have read the match length, which lane 0 writes.
    __syncwarp();
    for (int64_t j = lane; j < p.k; j += kWarpSize) write_draft_token(p, query, draft, n, i, j);
    return;
  }
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_device_store_append__workspace(const DeviceStoreAppendParams* params) {
  return device_store_append_workspace_words(params->batch);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_device_store_append_(const DeviceStoreAppendParams* params, void* stream) {
  if (params->workspace == nullptr) return kInvalidParams;
  const int32_t status = launch(device_store_plan_kernel, {dim3(1), kPlanThreads}, stream, *params);
  return status != kOk
             ? status
             : launch(device_store_append_kernel, {blocks_for(params->batch, 1), kAppendThreads}, stream, *params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_device_store_propose_(const DeviceStoreProposeParams* params, void* stream) {
  const dim3 grid = blocks_for(params->batch, kProposeWarps);
  return launch(device_store_propose_kernel, {grid, kProposeThreads}, stream, *params);
}

}  // namespace ngram_npu::cuda
