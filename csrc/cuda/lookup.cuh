// The lookup on a GPU. A block loads a share of a row at once: all of a short row, or some shares of a long row in
// turn. docs/design/kernels.md gives the reasons for this design.
#pragma once

#include "core/drafting.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

constexpr int32_t kVectorTokens = 4;    // 16 bytes: one load
constexpr int32_t kThreadVectors = 16;  // vectors of a share that a thread loads at once
constexpr int32_t kThreadTokens = kThreadVectors * kVectorTokens;
constexpr int32_t kWarpVectors = kThreadVectors * kWarpSize;
constexpr int32_t kWarpTokens = kThreadTokens * kWarpSize;
constexpr int32_t kHaloTokens = kMaxNgram;  // before a share, because a match may begin there
constexpr int32_t kMinLookupThreads = 96;   // at least one per draft token, and one per edge of a share
constexpr int32_t kMaxLookupThreads = 256;  // of a block that reads a whole row
constexpr int32_t kLongRowThreads = 128;    // of the blocks of longer rows, so that several are resident
constexpr int32_t kMaxSharesPerBlock = 4;   // more blocks than are resident are faster than a longer loop
static_assert(kHaloTokens % kVectorTokens == 0 && kMinLookupThreads >= kHaloTokens);
static_assert(sizeof(int32_t) * (kHaloTokens + kMaxLookupThreads * kThreadTokens) <= kMaxSharedBytes);
static_assert(kMinLookupThreads >= kMaxSampledWidth + 2 * (kVectorTokens - 1));
static_assert(kMinLookupThreads > kMaxNgram && kMinLookupThreads >= kMaxDraftTokens);
// Minimum number of blocks per multiprocessor, which limits a thread to 128 registers. PTX requests one block, because
// a driver might not reach 128 registers without spills. CMakeLists.txt generates PTX only for 8.7, and 8.7 only as
// PTX.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 870
constexpr int32_t kLookupBlocks = 1;
#else
constexpr int32_t kLookupBlocks = 2;
#endif

// Marks a pointer into a tensor as a pointer to global memory. Without this mark the compiler may emit generic
// accesses, which test the memory space at run time.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Loads tokens that are not needed again soon, so that the caches evict them first. NGRAM_NPU_PLAIN_LOADS
// selects plain loads, for measurements.
__device__ inline int4 load_once(const int4* vector) {
#if defined(NGRAM_NPU_PLAIN_LOADS)
  return *global(vector);
#else
  return __ldcs(vector);
#endif
}

// The tokens of one request: the tokens in its row, followed by the tokens to append.
struct RowTokens {
  const int32_t* row;
  const int32_t* sampled_tokens;
  int32_t num_in_row;
  int32_t length;  // number of all tokens; 0: there is nothing to look up

  __device__ int32_t operator[](int32_t i) const {
    return i < num_in_row ? global(row)[i] : global(sampled_tokens)[i - num_in_row];
  }
};

// A match as one number, so that the best of several matches has the maximum rank: a longer match is better; of equally
// long matches, the earlier or the later is better, by the match policy. 0: no match.
using Rank = unsigned long long;

__device__ inline Rank rank_of(int32_t len, int32_t end, bool is_latest) {
  const auto position = static_cast<uint32_t>(end);
  return static_cast<Rank>(len) << 32 | (is_latest ? position : ~position);
}

__device__ inline uint32_t len_of(Rank rank) { return static_cast<uint32_t>(rank >> 32); }

// Returns the match of a rank. The match is within the row for any rank.
__device__ inline Match match_of(Rank rank, const RowTokens& tokens, const LookupOptions& options) {
  const auto position = static_cast<uint32_t>(rank);
  const uint32_t end = options.match_policy == kLatest ? position : ~position, len = len_of(rank);
  if (int64_t{end} > int64_t{tokens.length} - 2 || len > static_cast<uint32_t>(options.max_n)) return {-1, 0};
  return {end, len};
}

// The workspace of a request, for grids with several blocks per request. launch_lookup() zeroes it.
struct RequestWorkspace {
  Rank best;
  uint32_t num_arrived;  // number of the request's blocks that have finished
  uint32_t unused;
};
static_assert(sizeof(RequestWorkspace) == kLookupWorkspaceWords * sizeof(int32_t));

// Shared memory of one block, besides the share's tokens in the dynamic shared memory.
struct LookupBlock {
  int32_t suffix[kMaxNgram];     // the row's last tokens, the newest first
  alignas(16) RowTokens tokens;  // so that 16 bytes are accessed at once
  alignas(16) RequestRow row;
  Rank best;                      // of the shares that this block has searched
  Rank joined_best;               // of all shares; only in the last block of a request with several blocks
  int32_t num_active_threads;     // that search and write the results
  int32_t num_remaining_threads;  // the other threads leave at once
  int64_t num_sampled;
  int32_t newest_token;
  bool is_last;
};

// Number of tokens of a block's share.
__device__ inline int32_t share_tokens() { return static_cast<int32_t>(blockDim.x) * kThreadTokens; }

// One thread's search for the positions at which matches end.
//
// A share has kThreadVectors aligned vectors per thread, and those of a warp are consecutive. The edges are the few
// ends before the first whole vector and after the last whole vector, and the ends in the sampled tokens; they belong
// to the share of the position. The tokens of a share and of the halo before it are copied to shared memory, so that a
// candidate is compared without loads.
class ShareSearch {
 public:
  // All members depend only on the tokens, so the loads start before the suffix is read.
  __device__ ShareSearch(const LookupOptions& options, LookupBlock& block)
      : tokens_(block.tokens), options_(options), block_(block), num_ends_(larger(tokens_.length - 1, 0)) {
    const auto misalignment = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tokens_.row) / sizeof(int32_t));
    const int32_t num_ends_in_row = smaller(tokens_.num_in_row, num_ends_);
    head_ = smaller(num_ends_in_row, -misalignment & (kVectorTokens - 1));
    num_vectors_ = static_cast<int32_t>(static_cast<uint32_t>(num_ends_in_row - head_) / kVectorTokens);
  }

  // At least 1, even if there is nothing to search.
  __device__ int32_t num_shares() const {
    const int32_t count = num_ends_ - head_;
    return count <= share_tokens() ? 1 : (count - 1) / share_tokens() + 1;  // most rows need no division
  }

  // Searches the shares first, first + step, ... in the order of the policy. Calls load_other_data() after the loads of
  // the first share. All active threads of the block call this function. It ends with a barrier only if the block has a
  // share.
  template <class Function>
  __device__ void search_shares(int32_t first, int32_t step, const Function& load_other_data) {
    const int32_t stop = num_shares();
    const auto share_at = [&](int32_t n) { return is_latest() ? stop - 1 - n : n; };
    if (first < stop) load(share_at(first));
    load_other_data();
    for (int32_t n = first; n < stop; n += step) {
      copy_to_shared_memory(share_at(n));
      __syncthreads();
      const bool searches_vectors = has_candidate(share_at(n));
      const int32_t edge = edge_;
      if (n + step < stop) load(share_at(n + step));
      if (searches_vectors) search_vectors(share_at(n));
      // Edges are not searched in the order of the policy, so a match of equal length may be better.
      if (edge >= 0) verify(share_at(n), edge, best_len());
      merge_into_block();
      __syncthreads();
      if (static_cast<int32_t>(len_of(block_.best)) >= static_cast<int32_t>(options_.max_n))
        break;  // later matches are not better
    }
  }

 private:
  __device__ static int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
  __device__ bool is_latest() const { return options_.match_policy == kLatest; }
  __device__ static int32_t lane() { return thread() % kWarpSize; }
  __device__ static int32_t first_vector_in_share() { return thread() / kWarpSize * kWarpVectors + lane(); }
  __device__ static int32_t vector_of(int32_t share, int32_t u) {
    return share * (share_tokens() / kVectorTokens) + first_vector_in_share() + u * kWarpSize;
  }
  // Whether the warp skips vectors u to kThreadVectors - 1 of a share, because the row has none of them. Tested for
  // some u only, because a test of every u takes more instructions than it saves.
  __device__ bool skips_from(int32_t share, int32_t u) const {
    return (u == 0 || u == 1 || u == kThreadVectors / 4 || u == kThreadVectors / 2) &&
           vector_of(share, u) - lane() >= num_vectors_;
  }
  // The first position of a share that is not part of the head.
  __device__ int32_t begin_of(int32_t share) const { return head_ + share * share_tokens(); }

  // The token at a position of the share or its halo, in shared memory.
  __device__ int32_t& token(int32_t share, int32_t position) const {
    return reinterpret_cast<int32_t*>(dynamic_shared_memory)[kHaloTokens + position - begin_of(share)];
  }
  // This thread's vectors of a share are u * kWarpSize vectors after the first one.
  __device__ int4* first_vector() const {
    return dynamic_shared_memory + kHaloTokens / kVectorTokens + first_vector_in_share();
  }

  // Instead of a vector beyond the row's last vector, the last vector is read again.
  __device__ void load(int32_t share) {
    const int4* const vectors = reinterpret_cast<const int4*>(tokens_.row + head_);
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      if (skips_from(share, u)) break;
      data_[u] = load_once(vectors + smaller(vector_of(share, u), num_vectors_ - 1));
    }
    halo_ = halo_of(share);
    edge_ = edge_of(share);
    if (halo_ >= 0) halo_token_ = tokens_[halo_];
    if (edge_ >= 0) edge_token_ = tokens_[edge_];
  }

  __device__ void copy_to_shared_memory(int32_t share) const {
    int4* const staged_vectors = first_vector();
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      if (skips_from(share, u)) break;
      if (vector_of(share, u) < num_vectors_) staged_vectors[u * kWarpSize] = data_[u];
    }
    if (halo_ >= 0) token(share, halo_) = halo_token_;
    if (edge_ >= 0) token(share, edge_) = edge_token_;
  }

  // This thread's position in the halo of a share, or -1.
  __device__ int32_t halo_of(int32_t share) const {
    const int32_t position = begin_of(share) - kHaloTokens + thread();
    return share > 0 && thread() < kHaloTokens && position < num_ends_ ? position : -1;
  }

  // This thread's edge of a share, or -1.
  __device__ int32_t edge_of(int32_t share) const {
    const int32_t head = share == 0 ? head_ : 0, n = thread() - head;
    if (n < 0) return thread();
    const int32_t begin = begin_of(share), first = larger(begin, head_ + num_vectors_ * kVectorTokens);
    return n < num_ends_ - first && n < share_tokens() - (first - begin) ? first + n : -1;
  }

  // A token can end a match only if it equals the row's newest token.
  __device__ bool is_candidate(int32_t token) const { return token == block_.suffix[0]; }

  __device__ bool has_candidate(int32_t share) const {
    bool has_candidate = false;
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      if (skips_from(share, u)) break;
      const int4& v = data_[u];
      has_candidate |= is_candidate(v.x) | is_candidate(v.y) | is_candidate(v.z) | is_candidate(v.w);
    }
    return has_candidate;
  }

  // Searches this thread's vectors in the order of the policy: only a longer match is better than an earlier one.
  __device__ void search_vectors(int32_t share) {
#pragma unroll 1
    for (int32_t n = 0; n < kThreadVectors; ++n) {
      const int32_t u = is_latest() ? kThreadVectors - 1 - n : n, v = vector_of(share, u);
      if (v >= num_vectors_) continue;
      const int4 data = first_vector()[u * kWarpSize];
      uint32_t candidates =
          static_cast<uint32_t>(is_candidate(data.x)) | static_cast<uint32_t>(is_candidate(data.y)) << 1 |
          static_cast<uint32_t>(is_candidate(data.z)) << 2 | static_cast<uint32_t>(is_candidate(data.w)) << 3;
      while (candidates != 0) {
        const int32_t k =
            is_latest() ? 31 - __clz(static_cast<int32_t>(candidates)) : __ffs(static_cast<int32_t>(candidates)) - 1;
        candidates ^= 1u << k;
        if (best_len() >= options_.max_n) return;
        verify(share, head_ + v * kVectorTokens + k, best_len() + 1);
      }
    }
  }

  // Updates the best match if at least `min_length` and min_n tokens up to `end` equal the row's last tokens. Compares
  // the farthest token first.
  __device__ void verify(int32_t share, int32_t end, int32_t min_length) {
    min_length = larger(static_cast<int32_t>(options_.min_n), min_length);
    const auto is_equal = [&](int32_t n) { return token(share, end - n) == block_.suffix[n]; };
    if (end + 1 < min_length || !is_equal(min_length - 1)) return;
    const int32_t limit = smaller(static_cast<int32_t>(options_.max_n), end + 1);
    int32_t len = 0;
    while (len < limit && is_equal(len)) ++len;
    if (len >= min_length) best_ = larger(best_, rank_of(len, end, is_latest()));
  }

  __device__ int32_t best_len() const { return static_cast<int32_t>(len_of(best_)); }

  // Merges the best match of the warp's threads into the block's best match.
  __device__ void merge_into_block() const {
    const uint32_t longest = __reduce_max_sync(kWholeWarp, len_of(best_));
    if (longest == 0) return;
    const uint32_t position = len_of(best_) == longest ? static_cast<uint32_t>(best_) : 0u;
    const Rank rank = static_cast<Rank>(longest) << 32 | __reduce_max_sync(kWholeWarp, position);
    if (lane() == 0) atomicMax(&block_.best, rank);
  }

  const RowTokens& tokens_;
  const LookupOptions& options_;
  LookupBlock& block_;
  int32_t num_ends_;     // positions at which a match may end: all but the newest token
  int32_t head_;         // number of ends before the first whole vector
  int32_t num_vectors_;  // whole vectors of ends in the row
  Rank best_ = 0;
  int4 data_[kThreadVectors];
  int32_t halo_;  // this thread's positions in the share that was loaded last
  int32_t edge_;
  int32_t halo_token_;
  int32_t edge_token_;
};

// Adds this block to the request's blocks that have finished. Returns whether it is the last one. A barrier must
// precede the call, so that no block of the request reads the row's length later.
__device__ inline bool arrive_last(RequestWorkspace& workspace) {
  return arrive(&workspace.num_arrived) + 1 == gridDim.y;
}

// Merges the results of a request's blocks. Returns true in the last of these blocks, which has to write the results.
__device__ inline bool join_blocks(RequestWorkspace& workspace, LookupBlock& block) {
  if (threadIdx.x == 0) {
    if (block.best != 0) atomicMax(&workspace.best, block.best);
    block.is_last = arrive_last(workspace);
    if (block.is_last) block.joined_best = workspace.best;
  }
  __syncthreads();
  return block.is_last;
}

// Fills the block's shared memory. Each thread loads at most one value, so that all loads run in parallel.
template <class Lookup>
__device__ void load_lookup_data(const Lookup& lookup, const LookupOptions& options, LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x), max_n = static_cast<int32_t>(options.max_n);
  const bool has_suffix_token = thread < smaller(max_n, block.tokens.length);
  int32_t token = kNoToken;
  if (has_suffix_token) {
    token = block.tokens[block.tokens.length - 1 - thread];
  } else if (thread == max_n) {
    token = lookup.newest_token(blockIdx.x);
  }
  if (has_suffix_token) {
    block.suffix[thread] = token;
  } else if (thread == max_n) {
    block.newest_token = token;
  }
}

// Returns how many threads of the block have work. These are whole warps, so that the other warps can leave at once.
__device__ inline int32_t count_active_threads(const RowTokens& tokens, const LookupOptions& options) {
  if (tokens.length > share_tokens()) return static_cast<int32_t>(blockDim.x);
  if (blockIdx.y > 0) return 0;  // the first block has the only share
  const int32_t num_edges = 2 * (kVectorTokens - 1) + tokens.length - tokens.num_in_row;
  const auto num_loads = static_cast<int32_t>(options.max_n) + 1;  // of load_lookup_data()
  const int32_t num_threads = larger(larger(num_edges, num_loads), static_cast<int32_t>(options.k));
  const auto num_tokens = static_cast<uint32_t>(larger(num_threads * kThreadTokens, tokens.length));
  return static_cast<int32_t>((num_tokens + kWarpTokens - 1) / kWarpTokens * kWarpSize);
}

// Performs the lookup of request blockIdx.x. All threads of all blocks call this function. `lookup` has these functions
// of a request:
//   read_tokens(i)                    tokens of its row; the first warp calls it, and lane 0's result is used
//   newest_token(i)                   the token that write_results() needs as block.newest_token
//   write_results(i, tokens, match)   writes the request's results
//   grow_row(i)                       writes the row's new length; called when no block will read the old length
template <class Lookup, class Params>
__device__ void look_up(const Lookup& lookup, const Params& p, LookupBlock& block) {
  const int64_t i = blockIdx.x;
  const uint32_t thread = threadIdx.x;
  if (thread < kWarpSize) {
    const RowTokens tokens = lookup.read_tokens(i);
    if (thread == 0) {
      block.tokens = tokens;
      const int32_t num_active = count_active_threads(tokens, p.lookup);
      block.num_active_threads = num_active;
      block.num_remaining_threads = gridDim.y == 1 ? num_active : static_cast<int32_t>(blockDim.x);
      block.best = 0;
    }
  }
  __syncthreads();
  auto* const workspaces = static_cast<RequestWorkspace*>(p.workspace);
  if (thread >= static_cast<uint32_t>(block.num_remaining_threads)) return;
  // The results of a row of one share do not depend on the request's other blocks.
  const bool is_joined = gridDim.y > 1 && block.tokens.length > share_tokens();
  if (thread < static_cast<uint32_t>(block.num_active_threads)) {
    ShareSearch search(p.lookup, block);
    search.search_shares(static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y),
                         [&] { load_lookup_data(lookup, p.lookup, block); });
    if (!is_joined || join_blocks(workspaces[i], block)) {
      const Rank best = is_joined ? block.joined_best : block.best;
      const uint32_t num_writing_threads = larger(static_cast<uint32_t>(p.lookup.k), 1u);
      if (thread / kWarpSize * kWarpSize < num_writing_threads)
        lookup.write_results(i, block.tokens, match_of(best, block.tokens, p.lookup));
      if (is_joined && thread == 0) lookup.grow_row(i);
    }
  }
  // With several blocks per request, this is usually not a warp that writes results, so nothing waits for the arrival.
  if (is_joined || thread + 1 != static_cast<uint32_t>(block.num_remaining_threads)) return;
  if (gridDim.y > 1 && !arrive_last(workspaces[i])) return;
  lookup.grow_row(i);
}

// Writes request i's draft, its number of tokens and its match length, with one thread per draft token. `padding_token`
// is for output positions that are not filled.
template <class Params>
__device__ void write_draft(const Params& p, int64_t i, const RowTokens& tokens, Match match, int32_t padding_token) {
  const auto j = static_cast<int32_t>(threadIdx.x);
  const auto load_token = [&](int32_t n) {
    if (n >= p.lookup.k || match.len == 0) return kNoToken;
    const uint32_t position = draft_read_position(static_cast<uint32_t>(match.end),
                                                  static_cast<uint32_t>(tokens.length), static_cast<uint32_t>(n));
    return tokens[static_cast<int32_t>(position)];
  };
  // Both warps load all tokens at once and before the lengths are known, so that no load waits for another.
  static_assert(kMaxDraftTokens == 2 * kWarpSize);
  const int32_t lane = j % kWarpSize, first_token = load_token(lane), second_token = load_token(lane + kWarpSize);
  const int32_t token = j < kWarpSize ? first_token : second_token;
  int32_t num_valid = count_leading_lanes(is_valid_token(first_token, p.lookup.vocab_size));
  if (num_valid == kWarpSize) num_valid += count_leading_lanes(is_valid_token(second_token, p.lookup.vocab_size));
  const DraftLengths lengths = end_before_invalid_id(max_draft_lengths(match, tokens.length, p.lookup), num_valid);
  if (j < p.lookup.k) p.draft_token_ids.set(i, j, j < lengths.num_filled ? token : padding_token);
  if (j == 0) {
    p.num_draft_tokens[i] = static_cast<int32_t>(lengths.num_drafted);
    p.match_len[i] = reported_match_len(match, lengths.num_drafted);
  }
}

// Returns one block per request if a block can hold a row of the tensor's capacity, and if all blocks run concurrently:
// large blocks need much shared memory. Otherwise, returns as many smaller blocks per request as run concurrently, but
// at most one per share and at least one for kMaxSharesPerBlock shares, unless a grid cannot have so many blocks.
// grid.x is 0 if there are too many requests.
template <class Params>
LaunchShape plan_lookup(void (*kernel)(Params), const Params& p) {
  const int64_t capacity = larger<int64_t>(p.token_ids.capacity, 1), batch = larger<int64_t>(p.batch, 1);
  const auto count_shared_bytes = [](int32_t threads) {
    return sizeof(int32_t) * static_cast<size_t>(kHaloTokens + threads * kThreadTokens);
  };
  const auto count_resident_blocks = [&](int32_t threads) {
    return resident_blocks(reinterpret_cast<const void*>(kernel), threads, count_shared_bytes(threads));
  };
  const int64_t warps = smaller<int64_t>((capacity - 1) / kWarpTokens + 1, kMaxLookupThreads / kWarpSize);
  int32_t threads = larger(static_cast<int32_t>(warps) * kWarpSize, kMinLookupThreads);
  int64_t blocks = 1;
  if (capacity > threads * kThreadTokens || (threads > kLongRowThreads && batch > count_resident_blocks(threads))) {
    threads = kLongRowThreads;
    const int64_t shares = (capacity - 1) / (threads * kThreadTokens) + 1;
    blocks = larger(count_resident_blocks(threads) / batch, (shares - 1) / kMaxSharesPerBlock + 1);
    // As few blocks as have the same maximum number of shares.
    const int64_t shares_per_block = (shares - 1) / smaller<int64_t>(blocks, UINT16_MAX) + 1;
    blocks = (shares - 1) / shares_per_block + 1;
  }
  const auto num_requests = static_cast<uint32_t>(p.batch >= 1 && p.batch <= INT32_MAX ? p.batch : 0);
  return {dim3(num_requests, static_cast<uint32_t>(blocks)), threads, count_shared_bytes(threads)};
}

template <class Params>
int64_t count_lookup_workspace_words(void (*kernel)(Params), const Params& p) {
  return plan_lookup(kernel, p).grid.y > 1 ? lookup_workspace_words(p.batch) : 0;
}

template <class Params>
int32_t launch_lookup(void (*kernel)(Params), const Params& p, void* stream) {
  const LaunchShape shape = plan_lookup(kernel, p);
  if (shape.grid.x < 1) return kInvalidParams;
  if (shape.grid.y > 1) {
    const int32_t status = zero_workspace(p.workspace, lookup_workspace_words(p.batch), stream);
    if (status != kOk) return status;
  }
  return launch(kernel, shape, stream, p);
}

}  // namespace ngram_npu::cuda
