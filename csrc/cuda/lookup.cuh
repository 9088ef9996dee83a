// The lookup on a GPU. The batch's rows are divided into tiles, which are distributed evenly to one wave of blocks. The
// last block to finish a row writes its result. docs/design/cuda.md gives the reasons for this design.
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

// Marks a pointer into a tensor as global. Without this the compiler may emit generic accesses, which test the kind of
// memory.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// The tokens of one request: the tokens in its row, followed by the tokens to append.
struct RowTokens {
  const int32_t* row;
  const int32_t* sampled;
  int32_t in_row;
  int32_t length;  // number of all tokens; 0: nothing to look up

  __device__ int32_t operator[](int32_t i) const { return i < in_row ? global(row)[i] : global(sampled)[i - in_row]; }
};

// Computes count_valid_prefix() with one load per lane instead of a chain of loads.
__device__ inline int64_t count_valid_prefix_by_warp(const int32_t* sampled, int64_t width, int64_t vocab_size) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0;; first += kWarpSize) {
    const int32_t k = first + lane;
    const uint32_t valid = __ballot_sync(kWholeWarp, k < width && is_valid_token(sampled[k], vocab_size));
    if (valid != kWholeWarp) return first + __ffs(static_cast<int32_t>(~valid)) - 1;
  }
}

// A match as one number, so that the best of several matches is the maximum: longer, then earlier or later. 0: no
// match.
using Rank = unsigned long long;

__device__ inline Rank rank_of(int32_t len, int32_t end, bool latest) {
  const auto position = static_cast<uint32_t>(end);
  return static_cast<Rank>(len) << 32 | (latest ? position : ~position);
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

// A request's part of the workspace, for grids of several blocks. The last block of the grid zeroes it.
struct RequestWorkspace {
  Rank best;
  uint32_t num_arrived;   // of the blocks that share the request's row
  uint32_t num_finished;  // of all blocks; used only in the first request's part
};
static_assert(sizeof(RequestWorkspace) == kLookupWorkspaceWords * sizeof(int32_t));

// Shared memory of one block. Contains the values that a search needs rarely, to save registers.
struct LookupBlock {
  int32_t suffix[kMaxNgram];  // the row's last tokens, the newest first
  RowTokens tokens;
  Rank best;
  int32_t full_match_tile;  // the first tile with a match of max_n tokens
  bool is_last;
  int32_t share_size;  // list entries per block
  int32_t share_end;   // end of this block's share
  int64_t request;     // the current request
  int32_t first_tile;  // list index of the current request's first tile
  int32_t warp_sums[kLookupWarps];
};

// One warp's search through the block's part of a row.
//
// End positions are searched in chunks of 32 vectors in the order of the policy: a match in a later chunk must be
// longer than the best one before. Instead of a vector beyond the row's last vector, the last vector is read again,
// which does not change the result. The edges are the few ends before the first whole vector and after the last one,
// and those in the sampled tokens.
class WarpSearch {
 public:
  __device__ WarpSearch(const RowTokens& tokens, const LookupOptions& options, LookupBlock& block)
      : block_(block), options_(options) {
    const int32_t ends = smaller(tokens.in_row, tokens.length - 1);  // in the row itself
    const int32_t head = count_head(tokens);
    num_vectors_ = (ends - head) / kVectorTokens;
    vectors_ = reinterpret_cast<const int4*>(tokens.row + head);
    const int32_t chunk = static_cast<int32_t>(threadIdx.x) / kWarpSize;
    const int32_t chunks = (num_vectors_ + kWarpSize - 1) / kWarpSize;
    first_ = (is_latest() ? chunks - 1 - chunk : chunk) * kWarpSize + lane();
  }

  __device__ int32_t num_tiles() const { return (num_vectors_ + kTileVectors - 1) / kTileVectors; }

  __device__ void load(int32_t tile, int4 (&data)[kThreadVectors]) const {
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) data[u] = global(vectors_)[vector_of(tile, u)];
  }

  // Sets the tokens that may end a match of `min_length` tokens; call it after the suffix has been read.
  __device__ void set_min_length(int32_t min_length) {
    second_newest_ = block_.suffix[options_.max_n > 1];
    factor_ = min_length > 1 ? 0x9e3779b1u : 0;
    target_ = static_cast<uint32_t>(second_newest_) * factor_ + static_cast<uint32_t>(block_.suffix[0]);
  }

  // Searches the loaded tile. Returns false if no later tile can have a better match.
  __device__ bool search_tile(int32_t tile, const int4 (&data)[kThreadVectors]) {
    bool has_candidate = is_found_before(tile);
#pragma unroll
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      const int4& v = data[u];
      has_candidate |=
          may_end_match(before(v), v.x) | may_end_match(v.x, v.y) | may_end_match(v.y, v.z) | may_end_match(v.z, v.w);
    }
    return !__any_sync(kWholeWarp, has_candidate) || verify_tile(tile);
  }

  __device__ void search_edges() {
    const int32_t head = count_head(block_.tokens);
    const int32_t after = head + num_vectors_ * kVectorTokens;  // first end after the vectors
    const int32_t count = head + (block_.tokens.length - 1 - after);
    // The edges are not searched in the order of the policy, so a match of equal length may be better.
    const int32_t min_length = larger(static_cast<int32_t>(options_.min_n), best_len());
    for (int32_t i = lane(); i < count; i += kWarpSize) verify(i < head ? i : after + (i - head), min_length);
  }

  // Merges the warp's best match into the block's best match.
  __device__ void report() const {
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
    const auto misaligned = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tokens.row) / sizeof(int32_t));
    return smaller(smaller(tokens.in_row, tokens.length - 1), -misaligned & (kVectorTokens - 1));
  }

  // Returns the u-th vector that a thread loads in a tile, in the order of the policy.
  __device__ uint32_t vector_of(int32_t tile, int32_t u) const {
    const int32_t step = is_latest() ? -kLookupThreads : kLookupThreads;
    const int32_t v = first_ + (tile * kThreadVectors + u) * step;
    return smaller(static_cast<uint32_t>(v), static_cast<uint32_t>(num_vectors_ - 1));
  }

  // Whether a warp of the block found a match of max_n tokens in an earlier tile; matches in later tiles are not
  // better.
  __device__ bool is_found_before(int32_t tile) const {
    return *static_cast<const volatile int32_t*>(&block_.full_match_tile) < tile;
  }

  // Whether a token may end a match: it equals the newest token, and for matches of two or more tokens the token before
  // it equals the second newest. There are a few false positives, which verify() rejects.
  __device__ bool may_end_match(int32_t before, int32_t token) const {
    return static_cast<uint32_t>(before) * factor_ + static_cast<uint32_t>(token) == target_;
  }
  // Returns the token before a lane's vector. For the first lane, this token is in another warp. Its lane gets the
  // second newest token instead, so that a match there is not excluded.
  __device__ int32_t before(const int4& v) const {
    const int32_t previous = __shfl_up_sync(kWholeWarp, v.w, 1);
    return lane() == 0 ? second_newest_ : previous;
  }

  // Verifies the candidates of a tile. Reads the tile again, from the cache, because keeping it would need
  // registers for every tile.
  __device__ bool verify_tile(int32_t tile) {
    if (__any_sync(kWholeWarp, is_found_before(tile))) return false;
    int32_t min_length = min_useful_length();
#pragma unroll 1
    for (int32_t u = 0; u < kThreadVectors; ++u) {
      const auto v = static_cast<int32_t>(vector_of(tile, u));
      const int4 data = global(vectors_)[v];
      uint32_t candidates = static_cast<uint32_t>(may_end_match(before(data), data.x)) |
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
  int32_t first_;  // the vector that this thread begins with
  int32_t num_vectors_;
  int32_t second_newest_;  // the second newest token
  uint32_t factor_;        // see may_end_match()
  uint32_t target_;
};

// Searches the tiles [first, stop). All threads of a block call it and may read block.best afterwards.
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
    int4 now[kThreadVectors], next[kThreadVectors];
    stop = smaller(stop, search.num_tiles());
    // The first loads start before the wait for the suffix.
    if (first < stop) search.load(first, next);
    if (thread < smaller<int32_t>(static_cast<int32_t>(options.max_n), tokens.length)) {
      block.suffix[thread] = tokens[tokens.length - 1 - thread];
    }
    __syncthreads();
    search.set_min_length(static_cast<int32_t>(options.min_n));
    for (int32_t tile = first; tile < stop; ++tile) {
      // Copied before the next loads, because at the end of the loop the wait for them would precede this tile's
      // search.
#pragma unroll
      for (int32_t u = 0; u < kThreadVectors; ++u) now[u] = next[u];
      if (tile + 1 < stop) search.load(tile + 1, next);
      if (!search.search_tile(tile, now)) break;
    }
    if (first == 0 && thread / kWarpSize == kLookupWarps - 1) search.search_edges();
    search.report();
  }
  __syncthreads();
}

// Number of tiles of a request, at least one, so that every request has a block that writes its results. In the list of
// all tiles a request has one more entry, before its tiles, because beginning and ending a request costs a block about
// as much as a tile.
__host__ __device__ inline int32_t count_tiles(int64_t length) {
  return static_cast<int32_t>(larger<int64_t>(1, (length + kTileTokens - 1) / kTileTokens));
}

// Computes the list of tiles, in every block, and finds the block's share. All blocks must read the same lengths. If
// another stream changes them, results are wrong, but no request beyond the batch is accessed.
template <class Lookup>
__device__ void find_share(const Lookup& lookup, int32_t batch, LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x), num_blocks = static_cast<int32_t>(gridDim.x);
  const int32_t per_thread = (batch + kLookupThreads - 1) / kLookupThreads;
  const int32_t first = smaller(thread * per_thread, batch), stop = smaller(first + per_thread, batch);
  int32_t num_entries = 0, total = 0;
#pragma unroll 4
  for (int32_t i = first; i < stop; ++i) num_entries += 1 + count_tiles(lookup.length(i));
  int32_t at = sum_over_block(num_entries, block.warp_sums, &total) - num_entries;
  const int32_t share_size = (total + num_blocks - 1) / num_blocks,
                begin = static_cast<int32_t>(blockIdx.x) * share_size;
  if (at <= begin && begin < at + num_entries) {
    int32_t i = first;
    for (int32_t n; i + 1 < stop && at + (n = 1 + count_tiles(lookup.length(i))) <= begin; ++i) at += n;
    block.request = i;
    block.first_tile = at + 1;
  }
  if (thread == 0) {
    block.share_size = share_size;
    block.share_end = smaller(begin + share_size, total);
    if (begin >= total) block.first_tile = total;
  }
  __syncthreads();
}

// Merges the results of a request's blocks. Returns true in the last of them; its block.best is then the request's
// best.
__device__ inline bool join_blocks(RequestWorkspace& workspace, int32_t blocks, LookupBlock& block) {
  if (threadIdx.x == 0) {
    if (block.best != 0) atomicMax(&workspace.best, block.best);
    block.is_last = arrive(&workspace.num_arrived) + 1 == static_cast<uint32_t>(blocks);
    if (block.is_last) block.best = workspace.best;
  }
  __syncthreads();
  return block.is_last;
}

// Does all lookups of a batch; all threads of all blocks call it. `lookup` has these functions of a request:
//   length(i)                  approximate number of tokens, from which the tiles are counted
//   tokens(i)                  its tokens; called by all threads of the block, so it may have a barrier
//   finish(i, tokens, match)   writes its results
//   finalize(i)                writes what other blocks read; called after every block has finished
template <class Lookup, class Params>
__device__ void look_up_all(const Lookup& lookup, const Params& p, LookupBlock& block) {
  find_share(lookup, static_cast<int32_t>(p.batch), block);
  auto* workspace = static_cast<RequestWorkspace*>(p.workspace);
  const int32_t &at = block.first_tile, &share_size = block.share_size;  // references, because registers are scarce
  const auto end_of_request = [&] { return at + count_tiles(lookup.length(block.request)); };
  while (at < block.share_end && block.request < p.batch) {
    const int32_t first = larger(static_cast<int32_t>(blockIdx.x) * share_size, at),
                  stop = smaller(block.share_end, end_of_request());
    search_tiles(lookup.tokens(block.request), p.lookup, first - at, stop - at, block);
    const int64_t i = block.request;
    const int32_t next = end_of_request(), blocks = (next - 1) / share_size - at / share_size + 1;
    if (blocks == 1 || join_blocks(workspace[i], blocks, block)) {
      lookup.finish(i, block.tokens, match_of(block.best, block.tokens, p.lookup));
    }
    __syncthreads();  // all threads are done with the block's shared memory
    if (threadIdx.x == 0) {
      block.request = i + 1;
      block.first_tile = next + 1;
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
  for (int32_t first = 0, before = 0;; first += kWarpSize) {
    const int32_t j = first + lane;
    const int32_t total = before + sum_over_warp(j < max_count ? int32_t{costs[j]} : 0);
    const uint32_t within_limit = __ballot_sync(kWholeWarp, j < max_count && is_within_cost_limit(total, options));
    if (within_limit != kWholeWarp) return first + __ffs(static_cast<int32_t>(~within_limit)) - 1;
    before = __shfl_sync(kWholeWarp, total, kWarpSize - 1);
  }
}

// Writes request i's draft and its two counts, with one thread per draft token. `padding_token` is for output positions
// that are not filled.
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

// Returns a grid of one wave of blocks, but not more blocks than there are list entries if all rows are full. Returns 0
// if the number of entries could overflow.
template <class Params>
dim3 lookup_grid(void (*kernel)(Params), const Params& p) {
  const int64_t tiles = count_tiles(p.token_ids.capacity), shares = tiles > 1 ? 1 + tiles : 1;
  if (p.batch < 1 || INT32_MAX / 2 / (1 + tiles) < p.batch) return dim3(0);
  const int32_t max_blocks = resident_blocks(reinterpret_cast<const void*>(kernel), kLookupThreads);
  return dim3(static_cast<uint32_t>(smaller<int64_t>(p.batch * shares, max_blocks)));
}

template <class Params>
int64_t lookup_workspace(void (*kernel)(Params), const Params& p) {
  return lookup_grid(kernel, p).x > 1 ? lookup_workspace_words(p.batch) : 0;
}

template <class Params>
int32_t launch_lookup(void (*kernel)(Params), const Params& p, void* stream) {
  const dim3 grid = lookup_grid(kernel, p);
  if (grid.x < 1 || (grid.x > 1 && p.workspace == nullptr)) return kInvalidParams;
  return launch(kernel, grid, kLookupThreads, stream, p);
}

}  // namespace ngram_npu::cuda
