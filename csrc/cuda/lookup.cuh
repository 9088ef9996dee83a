// The lookup on a GPU: the batch's rows are divided into tiles, which are distributed evenly to one
// wave of blocks; the last block to finish a row has its result. Why it is built this way: docs/design/cuda.md.
#pragma once

#include "core/drafting.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

constexpr int32_t kLookupThreads = 256;
constexpr int32_t kLookupWarps = kLookupThreads / kWarpSize;
// Minimum number of blocks per multiprocessor; with a higher minimum the compiler spills registers. PTX asks for one
// less, because its registers are the driver's to allot: CMakeLists.txt has it made for 8.7, and for that alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 870
constexpr int32_t kLookupBlocks = 3;
#else
constexpr int32_t kLookupBlocks = 4;
#endif
constexpr int32_t kVectorTokens = 4;  // 16 bytes: one load
constexpr int32_t kTileVectors = 4;   // of a thread; the next tile's are under way while a tile's are looked at
constexpr int32_t kVectorsOfAll = kLookupThreads * kTileVectors;
constexpr int32_t kTileTokens = kVectorsOfAll * kVectorTokens;

// A pointer into a tensor. Without this the compiler may emit generic accesses, which test the kind of memory.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// The tokens of one request: those in its row, followed by those that are about to be appended.
struct LiveTokens {
  const int32_t* row;
  const int32_t* sampled;
  int32_t in_row;
  int32_t length;  // of both; 0: nothing to look up

  __device__ int32_t operator[](int32_t i) const { return i < in_row ? global(row)[i] : global(sampled)[i - in_row]; }
};

// leading_run(), with one load a lane instead of a chain of them.
__device__ inline int64_t leading_run_by_warp(const int32_t* sampled, int64_t width, int64_t vocab_size) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0;; first += kWarpSize) {
    const int32_t k = first + lane;
    const uint32_t valid = __ballot_sync(kWholeWarp, k < width && is_valid_token(sampled[k], vocab_size));
    if (valid != kWholeWarp) return first + __ffs(static_cast<int32_t>(~valid)) - 1;
  }
}

// A candidate as one number, so that the best of many is their maximum: longer, then earlier or later. 0: none.
using Rank = unsigned long long;

__device__ inline Rank rank_of(int32_t len, int32_t end, bool latest) {
  const auto place = static_cast<uint32_t>(end);
  return static_cast<Rank>(len) << 32 | (latest ? place : ~place);
}

__device__ inline uint32_t len_of(Rank rank) { return static_cast<uint32_t>(rank >> 32); }

// The occurrence is within the row for any number.
__device__ inline Occurrence occurrence_of(Rank rank, const LiveTokens& tokens, const LookupOptions& options) {
  const auto place = static_cast<uint32_t>(rank);
  const int64_t end = options.match_policy == kLatest ? place : ~place;
  const int64_t len = len_of(rank);
  if (end > int64_t{tokens.length} - 2 || len > options.max_n) return {-1, 0};
  return {end, len};
}

// A request's part of the workspace, for grids of several blocks. The last block of the grid zeroes it.
struct LookupShared {
  Rank best;
  uint32_t arrived;  // of the blocks that share the request's row
  uint32_t left;     // the first request's: of all blocks
};
static_assert(sizeof(LookupShared) == kLookupWorkspaceWords * sizeof(int32_t));

// What the threads of one block share. What a search does not need all the time is here, not in registers.
struct LookupBlock {
  int32_t suffix[kMaxNgram];  // the row's last tokens, the newest first
  LiveTokens tokens;
  Rank best;
  int32_t found_in;  // the first tile with a match of max_n tokens
  bool last;
  int32_t each;     // places of the list that make a block's share
  int32_t end;      // of this block's
  int64_t request;  // the one at hand
  int32_t its_first_tile;
  int32_t warp_sums[kLookupWarps];
};

// One warp's search through the block's part of a row.
//
// Ends are searched in chunks of 32 vectors in the order of the policy: a match in a later chunk must be longer than
// the best so far. A vector beyond the row's last one reads the last one again, which changes nothing. The edges are
// the few ends before the first whole vector and after the last one, and those among the sampled tokens.
class WarpSearch {
 public:
  __device__ WarpSearch(const LiveTokens& tokens, const LookupOptions& options, LookupBlock& block)
      : block_(block), options_(options) {
    const int32_t ends = smaller(tokens.in_row, tokens.length - 1);  // in the row itself
    const int32_t head = head_of(tokens);
    num_vectors_ = (ends - head) / kVectorTokens;
    vectors_ = reinterpret_cast<const int4*>(tokens.row + head);
    const int32_t chunk = static_cast<int32_t>(threadIdx.x) / kWarpSize;
    const int32_t chunks = (num_vectors_ + kWarpSize - 1) / kWarpSize;
    first_ = (is_latest() ? chunks - 1 - chunk : chunk) * kWarpSize + lane();
  }

  __device__ int32_t num_tiles() const { return (num_vectors_ + kVectorsOfAll - 1) / kVectorsOfAll; }

  __device__ void load(int32_t tile, int4 (&data)[kTileVectors]) const {
#pragma unroll
    for (int32_t u = 0; u < kTileVectors; ++u) data[u] = global(vectors_)[vector_of(tile, u)];
  }

  // Sets the wanted tokens for a match of `need` tokens; call it after the suffix has been read.
  __device__ void choose_wanted(int32_t need) {
    second_ = block_.suffix[options_.max_n > 1];
    factor_ = need > 1 ? 0x9e3779b1u : 0;
    wanted_ = static_cast<uint32_t>(second_) * factor_ + static_cast<uint32_t>(block_.suffix[0]);
  }

  // Searches the loaded tile. False: no later tile can have a better match.
  __device__ bool look(int32_t tile, const int4 (&data)[kTileVectors]) {
    bool noted = found_before(tile);
#pragma unroll
    for (int32_t u = 0; u < kTileVectors; ++u) {
      const int4& v = data[u];
      noted |= is_wanted(before(v), v.x) | is_wanted(v.x, v.y) | is_wanted(v.y, v.z) | is_wanted(v.z, v.w);
    }
    return !__any_sync(kWholeWarp, noted) || look_again(tile);
  }

  __device__ void look_at_edges() {
    const int32_t head = head_of(block_.tokens);
    const int32_t after = head + num_vectors_ * kVectorTokens;  // the vectors
    const int32_t count = head + (block_.tokens.length - 1 - after);
    const int32_t need =
        larger(static_cast<int32_t>(options_.min_n), best_len());  // out of order: an equal may be better
    for (int32_t i = lane(); i < count; i += kWarpSize) verify(i < head ? i : after + (i - head), need);
  }

  // The warp's best, by its first lane, into the block's.
  __device__ void report() const {
    const int32_t longest = best_len();
    const uint32_t place = static_cast<int32_t>(len_of(best_)) == longest ? static_cast<uint32_t>(best_) : 0u;
    const Rank rank = static_cast<Rank>(longest) << 32 | __reduce_max_sync(kWholeWarp, place);
    if (lane() == 0 && longest > 0) atomicMax(&block_.best, rank);
  }

 private:
  __device__ static int32_t lane() { return static_cast<int32_t>(threadIdx.x) % kWarpSize; }
  __device__ bool is_latest() const { return options_.match_policy == kLatest; }

  // The number of ends before the first whole vector.
  __device__ static int32_t head_of(const LiveTokens& tokens) {
    const auto misaligned = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tokens.row) / sizeof(int32_t));
    return smaller(smaller(tokens.in_row, tokens.length - 1), -misaligned & (kVectorTokens - 1));
  }

  // The u-th vector that a thread loads in a tile, in the order of the policy.
  __device__ uint32_t vector_of(int32_t tile, int32_t u) const {
    const int32_t step = is_latest() ? -kLookupThreads : kLookupThreads;
    const int32_t v = first_ + (tile * kTileVectors + u) * step;
    return smaller(static_cast<uint32_t>(v), static_cast<uint32_t>(num_vectors_ - 1));
  }

  // Whether a warp of the block found a match of max_n tokens in an earlier tile: all that follow come after it.
  __device__ bool found_before(int32_t tile) const {
    return *static_cast<const volatile int32_t*>(&block_.found_in) < tile;
  }

  // Whether a token may end an occurrence: it equals the newest token, and for matches of two tokens or more the token
  // before it equals the second newest. A few others pass, which verify() rejects.
  __device__ bool is_wanted(int32_t before, int32_t token) const {
    return static_cast<uint32_t>(before) * factor_ + static_cast<uint32_t>(token) == wanted_;
  }
  // The token before a lane's vector. That of the first lane is in another warp, so any token is returned for it.
  __device__ int32_t before(const int4& v) const {
    const int32_t theirs = __shfl_up_sync(kWholeWarp, v.w, 1);
    return lane() == 0 ? second_ : theirs;
  }

  // Reads a tile with a candidate again, from the cache: keeping it would cost registers for every tile.
  __device__ bool look_again(int32_t tile) {
    if (__any_sync(kWholeWarp, found_before(tile))) return false;
    int32_t need = needed();
#pragma unroll 1
    for (int32_t u = 0; u < kTileVectors; ++u) {
      const auto v = static_cast<int32_t>(vector_of(tile, u));
      const int4 data = global(vectors_)[v];
      uint32_t candidates = static_cast<uint32_t>(is_wanted(before(data), data.x)) |
                            static_cast<uint32_t>(is_wanted(data.x, data.y)) << 1 |
                            static_cast<uint32_t>(is_wanted(data.y, data.z)) << 2 |
                            static_cast<uint32_t>(is_wanted(data.z, data.w)) << 3;
      while (candidates != 0) {
        const int32_t k = __ffs(static_cast<int32_t>(candidates)) - 1;
        candidates &= candidates - 1;
        verify(head_of(block_.tokens) + v * kVectorTokens + k, need);
      }
      need = needed();
      if (need > options_.max_n) {
        if (lane() == 0) atomicMin(&block_.found_in, tile);
        return false;
      }
      choose_wanted(need);
    }
    return true;
  }

  // Whether the last `need` tokens up to `end` are the row's last ones, and how many more: the farthest first.
  __device__ void verify(int32_t end, int32_t need) {
    const LiveTokens& tokens = block_.tokens;
    if (end + 1 < need || tokens[end - (need - 1)] != block_.suffix[need - 1]) return;
    const int32_t limit = smaller(static_cast<int32_t>(options_.max_n), end + 1);
    int32_t len = 0;
    while (len < limit && tokens[end - len] == block_.suffix[len]) ++len;
    if (len >= need) best_ = larger(best_, rank_of(len, end, is_latest()));
  }

  // The minimum length of a useful match.
  __device__ int32_t needed() const { return larger(static_cast<int32_t>(options_.min_n), best_len() + 1); }
  __device__ int32_t best_len() const { return static_cast<int32_t>(__reduce_max_sync(kWholeWarp, len_of(best_))); }

  LookupBlock& block_;
  const LookupOptions& options_;
  const int4* vectors_;
  Rank best_ = 0;
  int32_t first_;  // the vector that this thread begins with
  int32_t num_vectors_;
  int32_t second_;   // the second newest token
  uint32_t factor_;  // see is_wanted()
  uint32_t wanted_;
};

// Searches the tiles [first, stop). All threads of a block call it and may read block.best afterwards.
__device__ inline void search_tiles(const LiveTokens& tokens, const LookupOptions& options, int32_t first, int32_t stop,
                                    LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) {
    block.tokens = tokens;
    block.best = 0;
    block.found_in = INT32_MAX;
  }
  if (tokens.length >= 2) {
    WarpSearch search(tokens, options, block);
    int4 now[kTileVectors], next[kTileVectors];
    stop = smaller(stop, search.num_tiles());
    // The first loads start before the wait for the suffix.
    if (first < stop) search.load(first, next);
    if (thread < smaller<int32_t>(static_cast<int32_t>(options.max_n), tokens.length)) {
      block.suffix[thread] = tokens[tokens.length - 1 - thread];
    }
    __syncthreads();
    search.choose_wanted(static_cast<int32_t>(options.min_n));
    for (int32_t tile = first; tile < stop; ++tile) {
      // Before the next loads: at the loop's end the wait for them would come before this tile is looked at.
#pragma unroll
      for (int32_t u = 0; u < kTileVectors; ++u) now[u] = next[u];
      if (tile + 1 < stop) search.load(tile + 1, next);
      if (!search.look(tile, now)) break;
    }
    if (first == 0 && thread / kWarpSize == kLookupWarps - 1) search.look_at_edges();
    search.report();
  }
  __syncthreads();
}

// The tiles of a request: one at least, so that every request has a block that writes its results. On the list of all
// it takes one place more, before them: to begin and to end a request costs a block about as much as a tile does.
__host__ __device__ inline int32_t tiles_of(int64_t length) {
  return static_cast<int32_t>(larger<int64_t>(1, (length + kTileTokens - 1) / kTileTokens));
}

// Makes the list of tiles, in every block, and finds the block's share. All blocks must see the same lengths: where
// another stream changes them, results are wrong, but no request beyond the batch is named.
template <class Lookup>
__device__ void find_share(const Lookup& lookup, int32_t batch, LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x), groups = static_cast<int32_t>(gridDim.x);
  const int32_t per_thread = (batch + kLookupThreads - 1) / kLookupThreads;
  const int32_t first = smaller(thread * per_thread, batch), stop = smaller(first + per_thread, batch);
  int32_t places = 0, total = 0;
#pragma unroll 4
  for (int32_t i = first; i < stop; ++i) places += 1 + tiles_of(lookup.length(i));
  int32_t at = sum_over_block(places, block.warp_sums, &total) - places;
  const int32_t each = (total + groups - 1) / groups, begin = static_cast<int32_t>(blockIdx.x) * each;
  if (at <= begin && begin < at + places) {
    int32_t i = first;
    for (int32_t n; i + 1 < stop && at + (n = 1 + tiles_of(lookup.length(i))) <= begin; ++i) at += n;
    block.request = i;
    block.its_first_tile = at + 1;
  }
  if (thread == 0) {
    block.each = each;
    block.end = smaller(begin + each, total);
    if (begin >= total) block.its_first_tile = total;
  }
  __syncthreads();
}

// Combines the results of a request's blocks. True in the last of them, whose block.best is then the request's.
__device__ inline bool join_blocks(LookupShared& shared, int32_t blocks, LookupBlock& block) {
  if (threadIdx.x == 0) {
    if (block.best != 0) atomicMax(&shared.best, block.best);
    block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);
    if (block.last) block.best = shared.best;
  }
  __syncthreads();
  return block.last;
}

// All lookups of a batch, by all threads of all blocks. A `lookup` has, for a request,
//   length(i)                  approximate number of tokens, from which the tiles are counted
//   tokens(i)                  its tokens; called by all threads of the block, so it may have a barrier
//   finish(i, tokens, found)   writes its results
//   settle(i)                  writes what other blocks read; called after every block has finished
template <class Lookup, class Params>
__device__ void look_up_all(const Lookup& lookup, const Params& p, LookupBlock& block) {
  find_share(lookup, static_cast<int32_t>(p.batch), block);
  auto* shared = static_cast<LookupShared*>(p.workspace);
  const int32_t &at = block.its_first_tile, &each = block.each;  // from memory each time: registers are scarce
  const auto end_of_request = [&] { return at + tiles_of(lookup.length(block.request)); };
  while (at < block.end && block.request < p.batch) {
    const int32_t first = larger(static_cast<int32_t>(blockIdx.x) * each, at),
                  stop = smaller(block.end, end_of_request());
    search_tiles(lookup.tokens(block.request), p.lookup, first - at, stop - at, block);
    const int64_t i = block.request;
    const int32_t next = end_of_request(), blocks = (next - 1) / each - at / each + 1;
    if (blocks == 1 || join_blocks(shared[i], blocks, block)) {
      lookup.finish(i, block.tokens, occurrence_of(block.best, block.tokens, p.lookup));
    }
    __syncthreads();  // all are done with what the block shares
    if (threadIdx.x == 0) {
      block.request = i + 1;
      block.its_first_tile = next + 1;
    }
    __syncthreads();
  }
  if (!is_last_block(shared == nullptr ? nullptr : &shared->left, &block.last)) return;
  for (int64_t r = threadIdx.x; r < p.batch; r += kLookupThreads) {
    if (shared != nullptr) shared[r] = {};
    lookup.settle(r);
  }
}

// num_drafts(), by every warp: a lane a token, and no chain of loads.
__device__ inline int64_t num_drafts_by_warp(Occurrence match, int64_t num_tokens, const LookupOptions& options) {
  const auto most = static_cast<int32_t>(most_drafts(match, num_tokens, options));
  if (options.match_costs == nullptr) return most;
  const CostsByMatch costs{options.match_costs, match.len};
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0, before = 0;; first += kWarpSize) {
    const int32_t j = first + lane;
    const int32_t total = before + sum_over_warp(j < most ? int32_t{costs[j]} : 0);
    const uint32_t kept = __ballot_sync(kWholeWarp, j < most && is_within_limit(total, options));
    if (kept != kWholeWarp) return first + __ffs(static_cast<int32_t>(~kept)) - 1;
    before = __shfl_sync(kWholeWarp, total, kWarpSize - 1);
  }
}

// Request i's draft and its two counts, by one thread a slot. `unused` is for places that nothing is read for.
template <class Params>
__device__ void write_draft(const Params& p, int64_t i, const LiveTokens& tokens, Occurrence match, int32_t unused) {
  const int64_t count = num_drafts_by_warp(match, tokens.length, p.lookup);
  const uint32_t j = threadIdx.x, end = static_cast<uint32_t>(match.end), length = static_cast<uint32_t>(tokens.length);
  if (j < p.lookup.k) {
    const bool read = j < readable_drafts(match, tokens.length, count, p.lookup);
    p.draft_token_ids.set(i, j, read ? tokens[static_cast<int32_t>(draft_source(end, length, j))] : unused);
    if (p.draft_costs.data != nullptr) {
      const CostsByMatch costs{p.lookup.match_costs, match.len};
      p.draft_costs.data[i * p.draft_costs.stride + j] = j < count ? costs[j] : kNoCost;
    }
  }
  if (j == 0) {
    p.num_draft_tokens[i] = static_cast<int32_t>(count);
    p.match_len[i] = reported_len(match, count);
  }
}

// One wave, and no more blocks than there is work for where all rows are full; none: more tiles than can be counted.
template <class Params>
dim3 lookup_grid(void (*kernel)(Params), const Params& p) {
  const int64_t tiles = tiles_of(p.token_ids.capacity), shares = tiles > 1 ? 1 + tiles : 1;
  if (p.batch < 1 || INT32_MAX / 2 / (1 + tiles) < p.batch) return dim3(0);
  const int32_t at_once = resident_blocks(reinterpret_cast<const void*>(kernel), kLookupThreads);
  return dim3(static_cast<uint32_t>(smaller<int64_t>(p.batch * shares, at_once)));
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
