// CUDA kernels of the store's operators.
//
// An append has three launches. The first one, of one block, only reads the store: it decides which blocks each request
// continues and assigns new ones in the order of the batch, so that ranks that run the same step assign the same
// blocks. The second one copies the newest entries of all n-grams to be inserted to the second newest; the third one
// writes text, heads, slots and newest entries. Both read what the first one decided, and neither reads a word that it
// writes, except by atomics. A lookup is a launch of its own; the order of launches is the only order that the
// operators need.
#include "core/store.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

using namespace store;

constexpr int32_t kPlanThreads = 256;
constexpr int32_t kAppendThreads = 128;
constexpr int32_t kProposeThreads = 64;
constexpr int32_t kProposeWarps = kProposeThreads / kWarpSize;

struct PlanBlock {
  int32_t num_reserved;
  int64_t warp_sums[kPlanThreads / kWarpSize];
};

// A thread plans consecutive requests, so that sums over the threads are in the order of the batch.
__global__ void __launch_bounds__(kPlanThreads) store_plan_kernel(const __grid_constant__ StoreAppendParams p) {
  __shared__ PlanBlock block;
  auto* const appends = static_cast<StoreAppend*>(p.workspace);
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
    appends[i].first_block = next;
    next += appends[i].num_blocks;
  }
  if (threadIdx.x == 0) p.allocator[kPlannedNumber] = static_cast<int32_t>(next_number(p) + total);
}

// Calls write(entry, position) for the n-grams of all tokens that a request stores, by all threads of the block.
template <class Write>
__device__ void for_each_entry(const StoreAppendParams& p, const StoreAppend& append, const Write& write) {
  const int64_t i = blockIdx.x, row = p.row_indices[i];
  const uint64_t seed = seed_of_scope(scope_of(p.scopes, i));
  for (int64_t item = threadIdx.x; item < append.count * kSizes; item += kAppendThreads) {
    const int64_t t = item / kSizes;
    int32_t* const entry = find_entry(p, append, row, seed, t, item % kSizes);
    if (entry != nullptr) write(entry, position_of(append, t));
  }
}

// One block per request. Several n-grams may share an entry.
__global__ void __launch_bounds__(kAppendThreads) store_copy_kernel(const __grid_constant__ StoreAppendParams p) {
  const StoreAppend append = static_cast<const StoreAppend*>(p.workspace)[blockIdx.x];
  if (append.is_active == 0) return;
  for_each_entry(p, append, [](int32_t* entry, int32_t position) {
    atomicMax(&entry[kSecond], smaller(entry[kNewest], position));
  });
}

// One block per request.
__global__ void __launch_bounds__(kAppendThreads) store_append_kernel(const __grid_constant__ StoreAppendParams p) {
  const int64_t i = blockIdx.x;
  const auto thread = static_cast<int64_t>(threadIdx.x);
  const StoreAppend append = static_cast<const StoreAppend*>(p.workspace)[i];
  if (i == 0 && thread == 0) p.allocator[kNextNumber] = p.allocator[kPlannedNumber];
  if (append.is_active == 0) return;
  const int64_t row = p.row_indices[i], scope = scope_of(p.scopes, i);
  for (int64_t j = thread; j < append.num_blocks; j += kAppendThreads) write_head(p, append, scope, j);
  for (int64_t t = thread; t < num_written_tokens(append); t += kAppendThreads) write_token(p, append, row, t);
  for_each_entry(p, append, [](int32_t* entry, int32_t position) { atomicMax(&entry[kNewest], position); });
  if (thread == 0) finish_append(p, append, i);
}

// The number of j < count before the first one without `condition`, in every lane of a warp.
template <class Condition>
__device__ int32_t count_prefix_by_warp(int64_t count, const Condition& condition) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t begin = 0;; begin += kWarpSize) {
    const int64_t j = begin + lane;
    const int32_t num_lanes = count_leading_lanes(j < count && condition(j));
    if (num_lanes < kWarpSize) return begin + num_lanes;
  }
}

// One request's lookup by a warp.
class WarpLookup {
 public:
  __device__ WarpLookup(const StoreProposeParams& p, const Query& query, int32_t own_match)
      : p_(p), query_(query), own_match_(own_match), lane_(static_cast<int32_t>(threadIdx.x) % kWarpSize) {}

  // Lane n - 1 reads the entry of the n-gram of the row's last n tokens; all lanes then compare the tokens of its
  // occurrences, the longest n-gram first.
  __device__ StoreDraft choose_draft() {
    const bool has_token = lane_ < smaller<int64_t>(query_.length, kMaxSize);
    token_ = has_token ? query_.end[-1 - lane_] : 0;
    uint64_t power = 1;
    for (int32_t j = 0; j < lane_; ++j) power *= kHashBase;
    const auto hash = prefix_sum_over_warp(static_cast<unsigned long long>(static_cast<uint32_t>(token_) * power));
    const int32_t lane_level = level_of_size(lane_ + 1);
    int32_t newest = 0, second = 0;
    if (has_token && lane_level >= 0 && lane_ + 1 > own_match_) {
      const int32_t* const entry = entry_of(p_.contents.table, hash, seed_of_scope(query_.scope), lane_level);
      newest = entry[kNewest];
      second = entry[kSecond];
    }
    StoreDraft longest = no_draft();
    for (int32_t level = kSizes - 1; level >= 0; --level) {
      const int32_t n = size_of_level(level);
      const int32_t position = __shfl_sync(kWholeWarp, newest, n - 1);
      const int32_t second_position = __shfl_sync(kWholeWarp, second, n - 1);
      StoreDraft draft{n, find_valid_occurrence(position, n), no_occurrence()};
      if (draft.newest.row < 0) continue;
      draft.second = find_valid_occurrence(second_position, n);
      if (is_trusted(p_.contents, draft, own_match_)) return draft;
      if (longest.match_len == 0 && own_match_ == 0) longest = draft;
    }
    return longest;
  }

  __device__ void write_draft(const StoreDraft& draft, int64_t i) const {
    const Continuation newest = find_continuation(p_.contents, query_, draft.newest);
    const int32_t count =
        count_prefix_by_warp(newest.count, [&](int64_t j) { return is_valid_token(newest[j], p_.vocab_size); });
    int32_t agreement = kSingleOccurrence;
    if (draft.second.row >= 0) {
      const Continuation second = find_continuation(p_.contents, query_, draft.second);
      agreement = count_prefix_by_warp(smaller<int64_t>(count, second.count),
                                       [&](int64_t j) { return newest[j] == second[j]; });
    }
    const int32_t padding = padding_token(p_, query_);
    for (int64_t j = lane_; j < p_.k; j += kWarpSize) p_.draft_token_ids.set(i, j, j < count ? newest[j] : padding);
    if (lane_ > 0) return;
    p_.num_draft_tokens[i] = count;
    p_.match_len[i] = draft.match_len;
    p_.agreement[i] = agreement;
  }

 private:
  // The valid occurrence of n tokens before `position`, in every lane.
  __device__ Occurrence find_valid_occurrence(int32_t position, int32_t n) const {
    if (position <= 0) return no_occurrence();
    const Occurrence found = find_occurrence(p_, query_, position, n);
    if (found.row < 0) return no_occurrence();
    const bool differs = lane_ < n && ngram_token(p_.contents, found, lane_) != token_;
    return __any_sync(kWholeWarp, differs) ? no_occurrence() : found;
  }

  const StoreProposeParams& p_;
  const Query query_;
  const int32_t own_match_, lane_;
  int32_t token_ = 0;  // the row's last token but `lane`
};

// One warp per request.
__global__ void __launch_bounds__(kProposeThreads) store_propose_kernel(const __grid_constant__ StoreProposeParams p) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int64_t i = int64_t{blockIdx.x} * kProposeWarps + threadIdx.x / kWarpSize;
  if (i >= p.batch) return;
  const Query query = query_of(p, i);
  StoreDraft draft = no_draft();
  if (query.length > 0) {
    WarpLookup lookup(p, query, p.match_len[i]);
    draft = lookup.choose_draft();
    // All lanes have read the match length, which lane 0 writes.
    __syncwarp();
    if (draft.match_len > 0) {
      lookup.write_draft(draft, i);
      return;
    }
  }
  if (lane == 0) p.agreement[i] = kOwnDraft;
}

}  // namespace

NGRAM_NPU_EXPORT int64_t ngram_npu_cuda_store_append__workspace(const StoreAppendParams* params) {
  return store_append_workspace_words(params->batch);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_store_append_(const StoreAppendParams* params, void* stream) {
  if (params->workspace == nullptr) return kInvalidParams;
  const dim3 requests = blocks_for(params->batch, 1);
  int32_t status = launch(store_plan_kernel, {dim3(1), kPlanThreads}, stream, *params);
  if (status == kOk) status = launch(store_copy_kernel, {requests, kAppendThreads}, stream, *params);
  if (status == kOk) status = launch(store_append_kernel, {requests, kAppendThreads}, stream, *params);
  return status;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_store_propose_(const StoreProposeParams* params, void* stream) {
  const dim3 grid = blocks_for(params->batch, kProposeWarps);
  return launch(store_propose_kernel, {grid, kProposeThreads}, stream, *params);
}

}  // namespace ngram_npu::cuda
