// The lookup on a GPU. The batch's rows are divided into tiles, which are distributed evenly to one wave of blocks. The
// last block that finishes a row writes the row's result. docs/design/cuda.md gives the reasons for this design.
#pragma once

#include "core/drafting.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

constexpr int32_t kLookupThreads = 256;
constexpr int32_t kLookupWarps = kLookupThreads / kWarpSize;
// Minimum number of blocks per multiprocessor; with a higher minimum the compiler spills registers. For PTX the minimum
// is one less, because the driver allocates its registers. CMakeLists.txt generates PTX only for 8.7, and 8.7 only as
// PTX.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 870
constexpr int32_t kLookupBlocks = 3;
#else
constexpr int32_t kLookupBlocks = 4;
#endif
constexpr int32_t kVectorTokens = 4;   // 16 bytes: one load
constexpr int32_t kThreadVectors = 4;  // per thread; the next tile's vectors are loaded while a tile is searched
constexpr int32_t kTileVectors = kLookupThreads * kThreadVectors;
constexpr int32_t kTileTokens = kTileVectors * kVectorTokens;

// Marks a pointer into a tensor as a pointer to global memory. Without this mark the compiler may emit generic
// accesses, which test the memory space at run time.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
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

// Computes count_valid_prefix() with one load per lane instead of a chain of loads.
__device__ inline int64_t count_valid_prefix_by_warp(const int32_t* sampled_tokens, int64_t width, int64_t vocab_size) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0;; first += kWarpSize) {
    const int32_t k = first + lane;
    const uint32_t valid_lanes = __ballot_sync(kWholeWarp, k < width && is_valid_token(sampled_tokens[k], vocab_size));
    if (valid_lanes != kWholeWarp) return first + __ffs(static_cast<int32_t>(~valid_lanes)) - 1;
  }
}

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
  const int64_t end = options.match_policy == kLatest ? position : ~position;
  const int64_t len = len_of(rank);
  if (end > int64_t{tokens.length} - 2 || len > options.max_n) return {-1, 0};
  return {end, len};
}

// The workspace of a request, for grids of several blocks. The last block of the grid zeroes the workspaces.
struct RequestWorkspace {
  Rank best;
  uint32_t num_arrived;   // number of blocks that have finished their share of the request's row
  uint32_t num_finished;  // number of blocks that have finished; used only in the first request's workspace
};
static_assert(sizeof(RequestWorkspace) == kLookupWorkspaceWords * sizeof(int32_t));

// Shared memory of one block. The values that a search needs rarely are here instead of in registers.
struct LookupBlock {
  int32_t suffix[kMaxNgram];  // the row's last tokens, the newest first
  RowTokens tokens;
  Rank best;
  int32_t full_match_tile;  // the first tile with a match of max_n tokens
  bool is_last;
  int32_t share_size;  // number of entries of the list of tiles per block
  int32_t share_end;   // end of this block's share of the list
  int64_t request;     // the current request
  int32_t first_tile;  // list index of the current request's first tile
  int32_t warp_sums[kLookupWarps];
};

// One warp's search through the block's part of a row.
//
// End positions are searched in chunks of 32 vectors in the order of the policy: a match in a later chunk must be
// longer than the best match in an earlier chunk. Instead of a vector beyond the row's last vector, the last vector is
// read again, which does not change the result. The edges are the few ends before the first whole vector and after the
// last whole vector, and the ends in the sampled tokens.
class WarpSearch {
 public:
  __device__ WarpSearch(const RowTokens& tokens, const LookupOptions& options, LookupBlock& block)
      : block_(block), options_(options) {
    const int32_t num_ends = smaller(tokens.num_in_row, tokens.length - 1);  // ends in the row itself
    const int32_t head = count_head(tokens);
    num_vectors_ = (num_ends - head) / kVectorTokens;
    vectors_ = reinterpret_cast<const int4*>(tokens.row + head);
    const int32_t chunk = static_cast<int32_t>(threadIdx.x) / kWarpSize;
    const int32_t num_chunks = (num_vectors_ + kWarpSize - 1) / kWarpSize;
    first_vector_ = (is_latest() ? num_chunks - 1 - chunk : chunk) * kWarpSize + lane();
  }

  __device__ int32_t num_tiles() const { return (num_vectors_ + kTileVectors - 1) / kTileVectors; }

  __device__ void load(int32_t tile, int4 (&data)[kThreadVectors]) const {
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) data[u] = global(vectors_)[vector_of(tile, u)];
  }

  // Sets the tokens that may end a match of min_length tokens. Must be called after the suffix has been read.
  __device__ void set_min_length(int32_t min_length) {
    second_newest_token_ = block_.suffix[options_.max_n > 1];
    hash_factor_ = min_length > 1 ? 0x9e3779b1u : 0;
    target_hash_ = static_cast<uint32_t>(second_newest_token_) * hash_factor_ + static_cast<uint32_t>(block_.suffix[0]);
  }

  // Searches the loaded tile. Returns false if no later tile can have a better match.
  __device__ bool search_tile(int32_t tile, const int4 (&data)[kThreadVectors]) {
    bool has_candidate = has_full_match_before(tile);
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      const int4& v = data[u];
      has_candidate |= may_end_match(token_before(v), v.x) | may_end_match(v.x, v.y) | may_end_match(v.y, v.z) |
                       may_end_match(v.z, v.w);
    }
    return !__any_sync(kWholeWarp, has_candidate) || verify_tile(tile);
  }

  __device__ void search_edges() {
    const int32_t head = count_head(block_.tokens);
    const int32_t vectors_end = head + num_vectors_ * kVectorTokens;  // first end after the vectors
    const int32_t count = head + (block_.tokens.length - 1 - vectors_end);
    // The edges are not searched in the order of the policy, so a match of equal length may be better.
    const int32_t min_length = larger(static_cast<int32_t>(options_.min_n), best_len());
    for (int32_t i = lane(); i < count; i += kWarpSize) verify(i < head ? i : vectors_end + (i - head), min_length);
  }

  // Merges the warp's best match into the block's best match.
  __device__ void merge_into_block() const {
    const int32_t longest = best_len();
    const uint32_t position = static_cast<int32_t>(len_of(best_)) == longest ? static_cast<uint32_t>(best_) : 0u;
    const Rank rank = static_cast<Rank>(longest) << 32 | __reduce_max_sync(kWholeWarp, position);
    if (lane() == 0 && longest > 0) atomicMax(&block_.best, rank);
  }

 private:
  __device__ static int32_t lane() { return static_cast<int32_t>(threadIdx.x) % kWarpSize; }
  __device__ bool is_latest() const { return options_.match_policy == kLatest; }

  // Returns the number of ends before the first whole vector.
  __device__ static int32_t count_head(const RowTokens& tokens) {
    const auto misalignment = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tokens.row) / sizeof(int32_t));
    return smaller(smaller(tokens.num_in_row, tokens.length - 1), -misalignment & (kVectorTokens - 1));
  }

  // Returns the u-th vector that a thread loads in a tile, in the order of the policy.
  __device__ uint32_t vector_of(int32_t tile, int32_t u) const {
    const int32_t step = is_latest() ? -kLookupThreads : kLookupThreads;
    const int32_t v = first_vector_ + (tile * kThreadVectors + u) * step;
    return smaller(static_cast<uint32_t>(v), static_cast<uint32_t>(num_vectors_ - 1));
  }

  // Whether a warp of the block has found a match of max_n tokens in a tile before `tile`. Later matches are not
  // better.
  __device__ bool has_full_match_before(int32_t tile) const {
    return *static_cast<const volatile int32_t*>(&block_.full_match_tile) < tile;
  }

  // Whether a token may end a match: it equals the newest token, and for matches of two or more tokens the token before
  // it equals the second newest. There are a few false positives, which verify() rejects.
  __device__ bool may_end_match(int32_t previous_token, int32_t token) const {
    return static_cast<uint32_t>(previous_token) * hash_factor_ + static_cast<uint32_t>(token) == target_hash_;
  }
  // Returns the token before a lane's vector. For lane 0, this token is in another warp; lane 0 gets the second newest
  // token instead, so that a match is not excluded.
  __device__ int32_t token_before(const int4& v) const {
    const int32_t previous_token = __shfl_up_sync(kWholeWarp, v.w, 1);
    return lane() == 0 ? second_newest_token_ : previous_token;
  }

  // Verifies the candidates of a tile. Reads the tile again, from the cache, because keeping it would need registers.
  __device__ bool verify_tile(int32_t tile) {
    if (__any_sync(kWholeWarp, has_full_match_before(tile))) return false;
    int32_t min_length = min_useful_length();
#pragma unroll 1
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      const auto v = static_cast<int32_t>(vector_of(tile, u));
      const int4 data = global(vectors_)[v];
      uint32_t candidates = static_cast<uint32_t>(may_end_match(token_before(data), data.x)) |
                            static_cast<uint32_t>(may_end_match(data.x, data.y)) << 1 |
                            static_cast<uint32_t>(may_end_match(data.y, data.z)) << 2 |
                            static_cast<uint32_t>(may_end_match(data.z, data.w)) << 3;
      while (candidates != 0) {
        const int32_t k = __ffs(static_cast<int32_t>(candidates)) - 1;
        candidates &= candidates - 1;
        verify(count_head(block_.tokens) + v * kVectorTokens + k, min_length);
      }
      min_length = min_useful_length();
      if (min_length > options_.max_n) {
        if (lane() == 0) atomicMin(&block_.full_match_tile, tile);
        return false;
      }
      set_min_length(min_length);
    }
    return true;
  }

  // Updates the best match if at least `min_length` tokens up to `end` equal the row's last tokens. Compares the
  // farthest token first.
  __device__ void verify(int32_t end, int32_t min_length) {
    const RowTokens& tokens = block_.tokens;
    if (end + 1 < min_length || tokens[end - (min_length - 1)] != block_.suffix[min_length - 1]) return;
    const int32_t limit = smaller(static_cast<int32_t>(options_.max_n), end + 1);
    int32_t len = 0;
    while (len < limit && tokens[end - len] == block_.suffix[len]) ++len;
    if (len >= min_length) best_ = larger(best_, rank_of(len, end, is_latest()));
  }

  // The minimum length of a useful match.
  __device__ int32_t min_useful_length() const { return larger(static_cast<int32_t>(options_.min_n), best_len() + 1); }
  __device__ int32_t best_len() const { return static_cast<int32_t>(__reduce_max_sync(kWholeWarp, len_of(best_))); }

  LookupBlock& block_;
  const LookupOptions& options_;
  const int4* vectors_;
  Rank best_ = 0;
  int32_t first_vector_;  // index of the vector that this thread begins with
  int32_t num_vectors_;
  int32_t second_newest_token_;
  uint32_t hash_factor_;  // see may_end_match()
  uint32_t target_hash_;
};

// Searches the tiles [first, stop). All threads of a block call this function and may read block.best afterwards.
__device__ inline void search_tiles(const RowTokens& tokens, const LookupOptions& options, int32_t first, int32_t stop,
                                    LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) {
    block.tokens = tokens;
    block.best = 0;
    block.full_match_tile = INT32_MAX;
  }
  if (tokens.length >= 2) {
    WarpSearch search(tokens, options, block);
    int4 current_data[kThreadVectors], next_data[kThreadVectors];
    stop = smaller(stop, search.num_tiles());
    // The first loads start before the wait for the suffix.
    if (first < stop) search.load(first, next_data);
    if (thread < smaller<int32_t>(static_cast<int32_t>(options.max_n), tokens.length)) {
      block.suffix[thread] = tokens[tokens.length - 1 - thread];
    }
    __syncthreads();
    search.set_min_length(static_cast<int32_t>(options.min_n));
    for (int32_t tile = first; tile < stop; ++tile) {
      // The loaded data is copied before the next loads. If it were copied at the end of the loop, the search of this
      // tile would wait for the next loads.
#pragma unroll
      for (int32_t u = 0; u < kThreadVectors; ++u) current_data[u] = next_data[u];
      if (tile + 1 < stop) search.load(tile + 1, next_data);
      if (!search.search_tile(tile, current_data)) break;
    }
    if (first == 0 && thread / kWarpSize == kLookupWarps - 1) search.search_edges();
    search.merge_into_block();
  }
  __syncthreads();
}

// Number of tiles of a request, at least one, so that every request has a block that writes its results. In the list of
// all tiles a request has one more entry, before its tiles, because beginning and ending a request costs a block about
// as much as a tile.
__host__ __device__ inline int32_t count_tiles(int64_t length) {
  return static_cast<int32_t>(larger<int64_t>(1, (length + kTileTokens - 1) / kTileTokens));
}

// Counts the entries of the list of tiles, in every block, and computes the block's share of the list. All blocks must
// read the same lengths. If another stream changes the lengths, results are wrong, but all accesses are valid.
template <class Lookup>
__device__ void compute_share(const Lookup& lookup, int32_t batch, LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x), num_blocks = static_cast<int32_t>(gridDim.x);
  const int32_t per_thread = (batch + kLookupThreads - 1) / kLookupThreads;
  const int32_t first = smaller(thread * per_thread, batch), stop = smaller(first + per_thread, batch);
  int32_t num_entries = 0, total = 0;
#pragma unroll 4
  for (int32_t i = first; i < stop; ++i) num_entries += 1 + count_tiles(lookup.length(i));
  int32_t entry = prefix_sum_over_block(num_entries, block.warp_sums, &total) - num_entries;
  const int32_t share_size = (total + num_blocks - 1) / num_blocks,
                begin = static_cast<int32_t>(blockIdx.x) * share_size;
  if (entry <= begin && begin < entry + num_entries) {
    int32_t i = first;
    for (int32_t n; i + 1 < stop && entry + (n = 1 + count_tiles(lookup.length(i))) <= begin; ++i) entry += n;
    block.request = i;
    block.first_tile = entry + 1;
  }
  if (thread == 0) {
    block.share_size = share_size;
    block.share_end = smaller(begin + share_size, total);
    if (begin >= total) block.first_tile = total;
  }
  __syncthreads();
}

// Merges the results of a request's blocks. Returns true in the last of these blocks, whose block.best is the request's
// best match.
__device__ inline bool join_blocks(RequestWorkspace& workspace, int32_t num_blocks, LookupBlock& block) {
  if (threadIdx.x == 0) {
    if (block.best != 0) atomicMax(&workspace.best, block.best);
    block.is_last = arrive(&workspace.num_arrived) + 1 == static_cast<uint32_t>(num_blocks);
    if (block.is_last) block.best = workspace.best;
  }
  __syncthreads();
  return block.is_last;
}

// Performs all lookups of a batch. All threads of all blocks call this function. `lookup` has these functions of a
// request:
//   length(i)                         approximate number of tokens, which determines the number of tiles
//   tokens(i)                         tokens of its row; all threads of the block call it, so it may have a barrier
//   write_results(i, tokens, match)   writes the request's results
//   finalize(i)                       writes what other blocks read; called after every block has finished
template <class Lookup, class Params>
__device__ void look_up_all(const Lookup& lookup, const Params& p, LookupBlock& block) {
  compute_share(lookup, static_cast<int32_t>(p.batch), block);
  auto* workspace = static_cast<RequestWorkspace*>(p.workspace);
  const int32_t &first_tile = block.first_tile,
                &share_size = block.share_size;  // references, because registers are scarce
  const auto end_of_request = [&] { return first_tile + count_tiles(lookup.length(block.request)); };
  while (first_tile < block.share_end && block.request < p.batch) {
    const int32_t first = larger(static_cast<int32_t>(blockIdx.x) * share_size, first_tile),
                  stop = smaller(block.share_end, end_of_request());
    search_tiles(lookup.tokens(block.request), p.lookup, first - first_tile, stop - first_tile, block);
    const int64_t i = block.request;
    const int32_t request_end = end_of_request();
    const int32_t num_blocks = (request_end - 1) / share_size - first_tile / share_size + 1;
    if (num_blocks == 1 || join_blocks(workspace[i], num_blocks, block)) {
      lookup.write_results(i, block.tokens, match_of(block.best, block.tokens, p.lookup));
    }
    __syncthreads();  // all threads are done with the block's shared memory
    if (threadIdx.x == 0) {
      block.request = i + 1;
      block.first_tile = request_end + 1;
    }
    __syncthreads();
  }
  if (!is_last_block(workspace == nullptr ? nullptr : &workspace->num_finished, &block.is_last)) return;
  for (int64_t r = threadIdx.x; r < p.batch; r += kLookupThreads) {
    if (workspace != nullptr) workspace[r] = {};
    lookup.finalize(r);
  }
}

// Computes count_draft_tokens() in every warp, with one lane per token and without a chain of loads.
__device__ inline int64_t count_draft_tokens_by_warp(Match match, int64_t num_tokens, const LookupOptions& options) {
  const auto max_count = static_cast<int32_t>(max_draft_tokens(match, num_tokens, options));
  if (options.match_costs == nullptr) return max_count;
  const CostsByMatch costs{options.match_costs, match.len};
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0, cost_before = 0;; first += kWarpSize) {
    const int32_t j = first + lane;
    const int32_t total_cost = cost_before + prefix_sum_over_warp(j < max_count ? int32_t{costs[j]} : 0);
    const uint32_t within_limit = __ballot_sync(kWholeWarp, j < max_count && is_within_cost_limit(total_cost, options));
    if (within_limit != kWholeWarp) return first + __ffs(static_cast<int32_t>(~within_limit)) - 1;
    cost_before = __shfl_sync(kWholeWarp, total_cost, kWarpSize - 1);
  }
}

// Writes request i's draft, its number of tokens and its match length, with one thread per draft token. `padding_token`
// is for output positions that are not filled.
template <class Params>
__device__ void write_draft(const Params& p, int64_t i, const RowTokens& tokens, Match match, int32_t padding_token) {
  const int64_t count = count_draft_tokens_by_warp(match, tokens.length, p.lookup);
  const uint32_t j = threadIdx.x, end = static_cast<uint32_t>(match.end), length = static_cast<uint32_t>(tokens.length);
  if (j < p.lookup.k) {
    const bool is_filled = j < count_filled_positions(match, tokens.length, count, p.lookup);
    p.draft_token_ids.set(
        i, j, is_filled ? tokens[static_cast<int32_t>(draft_read_position(end, length, j))] : padding_token);
    if (p.draft_costs.data != nullptr) {
      const CostsByMatch costs{p.lookup.match_costs, match.len};
      p.draft_costs.data[i * p.draft_costs.stride + j] = j < count ? costs[j] : kNoCost;
    }
  }
  if (j == 0) {
    p.num_draft_tokens[i] = static_cast<int32_t>(count);
    p.match_len[i] = reported_match_len(match, count);
  }
}

// Returns a grid of one wave of blocks, but at most one block per list entry if all rows are full; 0 if the number of
// entries could overflow.
template <class Params>
dim3 make_lookup_grid(void (*kernel)(Params), const Params& p) {
  const int64_t tiles = count_tiles(p.token_ids.capacity), entries = tiles > 1 ? 1 + tiles : 1;
  if (p.batch < 1 || INT32_MAX / 2 / (1 + tiles) < p.batch) return dim3(0);
  const int32_t max_blocks = resident_blocks(reinterpret_cast<const void*>(kernel), kLookupThreads);
  return dim3(static_cast<uint32_t>(smaller<int64_t>(p.batch * entries, max_blocks)));
}

template <class Params>
int64_t count_lookup_workspace_words(void (*kernel)(Params), const Params& p) {
  return make_lookup_grid(kernel, p).x > 1 ? lookup_workspace_words(p.batch) : 0;
}

template <class Params>
int32_t launch_lookup(void (*kernel)(Params), const Params& p, void* stream) {
  const dim3 grid = make_lookup_grid(kernel, p);
  if (grid.x < 1 || (grid.x > 1 && p.workspace == nullptr)) return kInvalidParams;
  return launch(kernel, grid, kLookupThreads, stream, p);
}

}  // namespace ngram_npu::cuda
