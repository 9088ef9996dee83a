// The stateless lookup on a GPU, for ngram_propose, ngram_step_ and the rows an index does not answer: a request's row
// is shared out to `groups` blocks, each live token is read once, and the last block to finish has the answer. Why it
// is built this way: docs/design/cuda.md.
#pragma once

#include "core/lookup_rules.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

constexpr int32_t kLookupThreads = 256;
constexpr int32_t kLookupWarps = kLookupThreads / kWarpSize;
constexpr int32_t kLookupBlocks = 4;  // of a multiprocessor, at least: asked for more, the compiler spills registers
constexpr int32_t kVectorTokens = 4;  // 16 bytes: one load
constexpr int32_t kTileVectors = 4;   // loads a thread has under way at once
constexpr int32_t kTileChunks = kLookupWarps * kTileVectors;
constexpr int32_t kTileTokens = kLookupThreads * kTileVectors * kVectorTokens;

// The tokens of one request: those in its row, and behind them those that are about to be appended to it.
struct LiveTokens {
  const int32_t* row;
  const int32_t* sampled;
  int32_t in_row;
  int32_t length;  // of both; 0: nothing to look up

  __device__ int32_t operator[](int32_t i) const { return i < in_row ? row[i] : sampled[i - in_row]; }
};

// A candidate as one number, so that the best of many is their maximum: longer, then earlier or later. 0: none.
using Rank = unsigned long long;

__device__ inline Rank rank_of(int32_t len, int32_t end, bool latest) {
  const auto place = static_cast<uint32_t>(end);
  return static_cast<Rank>(len) << 32 | (latest ? place : ~place);
}

__device__ inline uint32_t len_of(Rank rank) { return static_cast<uint32_t>(rank >> 32); }

// Whatever the number is, the occurrence lies in the row.
__device__ inline Occurrence occurrence_of(Rank rank, const LiveTokens& tokens, const LookupOptions& options) {
  const auto place = static_cast<uint32_t>(rank);
  const int64_t end = options.match_policy == kLatest ? place : ~place;
  const int64_t len = len_of(rank);
  if (end > int64_t{tokens.length} - 2 || len > options.max_n) return {-1, 0};
  return {end, len};
}

// A request's part of the workspace, where several blocks share its row. The last one leaves it zeroed.
struct LookupShared {
  Rank best;
  uint32_t arrived;
  uint32_t unused;
};
static_assert(sizeof(LookupShared) == kLookupWorkspaceWords * sizeof(int32_t));

// What the threads of one block share.
struct LookupBlock {
  int32_t suffix[kMaxNgram];  // the row's last tokens, the newest first
  Rank best;
  bool last;
};

// One warp's search through the block's part of a row.
//
// Ends are looked at by chunks of 32 vectors in the order of the policy: a later chunk has to beat the best of the
// earlier ones, not to equal it. The few ends before the first whole vector and behind the last one, and those among
// the sampled tokens, are the edges: one warp of the request looks at them one by one.
class WarpSearch {
 public:
  __device__ WarpSearch(const LiveTokens& tokens, const LookupOptions& options, const int32_t* suffix)
      : tokens_(tokens),
        suffix_(suffix),
        max_n_(static_cast<int32_t>(options.max_n)),
        min_n_(static_cast<int32_t>(options.min_n)),
        need_(min_n_),
        lane_(static_cast<int32_t>(threadIdx.x) % kWarpSize),
        warp_(static_cast<int32_t>(threadIdx.x) / kWarpSize),
        latest_(options.match_policy == kLatest) {
    const int32_t ends = smaller(tokens.in_row, tokens.length - 1);  // in the row itself
    const auto misaligned = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tokens.row) / sizeof(int32_t));
    head_ = smaller(ends, -misaligned & (kVectorTokens - 1));
    num_vectors_ = (ends - head_) / kVectorTokens;
    num_chunks_ = (num_vectors_ + kWarpSize - 1) / kWarpSize;
  }

  __device__ int32_t num_tiles() const { return (num_chunks_ + kTileChunks - 1) / kTileChunks; }

  __device__ void load(int32_t tile) {
    const auto* vectors = reinterpret_cast<const int4*>(tokens_.row + head_);
#pragma unroll
    for (int32_t u = 0; u < kTileVectors; ++u) {
      const int32_t v = vector_of(tile, u);
      data_[u] = v < num_vectors_ ? vectors[v] : int4{};
    }
  }

  // Looks at what was loaded. False: nothing that follows can be better.
  __device__ bool look(int32_t tile) {
#pragma unroll
    for (int32_t u = 0; u < kTileVectors; ++u) {
      const int32_t v = vector_of(tile, u);
      const uint32_t found = candidates_in(data_[u]);
      uint32_t candidates = v < num_vectors_ ? found : 0;
      if (!__any_sync(kWholeWarp, candidates != 0)) continue;
      while (candidates != 0) {
        const int32_t k = __ffs(static_cast<int32_t>(candidates)) - 1;
        candidates &= candidates - 1;
        verify(head_ + v * kVectorTokens + k, need_);
      }
      need_ = larger(min_n_, best_len() + 1);
      if (need_ > max_n_) return false;
    }
    return true;
  }

  __device__ void look_at_edges() {
    const int32_t behind = head_ + num_vectors_ * kVectorTokens;  // the vectors
    const int32_t count = head_ + (tokens_.length - 1 - behind);
    const int32_t need = larger(min_n_, best_len());  // out of order: an equal may be better
    for (int32_t i = lane_; i < count; i += kWarpSize) verify(i < head_ ? i : behind + (i - head_), need);
  }

  // The warp's best, by its first lane, into the block's.
  __device__ void report(Rank* best) const {
    const int32_t longest = best_len();
    const uint32_t place = static_cast<int32_t>(len_of(best_)) == longest ? static_cast<uint32_t>(best_) : 0u;
    const Rank rank = static_cast<Rank>(longest) << 32 | __reduce_max_sync(kWholeWarp, place);
    if (lane_ == 0 && longest > 0) atomicMax(best, rank);
  }

 private:
  // Which vector a thread loads u-th in a tile; num_vectors_ or more where there is none.
  __device__ int32_t vector_of(int32_t tile, int32_t u) const {
    const int32_t chunk = (tile * kTileVectors + u) * kLookupWarps + warp_;
    if (chunk >= num_chunks_) return num_vectors_;
    return (latest_ ? num_chunks_ - 1 - chunk : chunk) * kWarpSize + lane_;
  }

  // A bit for each token of a vector that may end an occurrence: it is the newest token, and the one before it is the
  // newest but one where that is asked for.
  __device__ uint32_t candidates_in(const int4& v) const {
    const int32_t newest = suffix_[0];
    const int32_t before = __shfl_up_sync(kWholeWarp, v.w, 1);
    uint32_t found = (v.x == newest) | (v.y == newest) << 1 | (v.z == newest) << 2 | (v.w == newest) << 3;
    if (need_ > 1) {
      const int32_t second = suffix_[1];
      found &= (before == second || lane_ == 0) | (v.x == second) << 1 | (v.y == second) << 2 | (v.z == second) << 3;
    }
    return found;
  }

  // Whether the last `need` tokens up to `end` are the row's last ones, and how many more. The farthest comes first:
  // it is the one that most candidates fail at.
  __device__ void verify(int32_t end, int32_t need) {
    if (end + 1 < need || tokens_[end - (need - 1)] != suffix_[need - 1]) return;
    const int32_t limit = smaller(max_n_, end + 1);
    int32_t len = 0;
    while (len < limit && tokens_[end - len] == suffix_[len]) ++len;
    if (len >= need) best_ = larger(best_, rank_of(len, end, latest_));
  }

  __device__ int32_t best_len() const { return static_cast<int32_t>(__reduce_max_sync(kWholeWarp, len_of(best_))); }

  const LiveTokens& tokens_;
  const int32_t* suffix_;
  int4 data_[kTileVectors];
  Rank best_ = 0;
  int32_t max_n_;
  int32_t min_n_;
  int32_t need_;
  int32_t lane_;
  int32_t warp_;
  int32_t head_;  // ends before the first whole vector
  int32_t num_vectors_;
  int32_t num_chunks_;
  bool latest_;
};

// Looks up in the tiles group, group + groups, ... Called by all threads of a block; block.best is known to all of them
// afterwards.
__device__ inline void search_tiles(const LiveTokens& tokens, const LookupOptions& options, int32_t group,
                                    int32_t groups, LookupBlock& block) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) block.best = 0;
  if (tokens.length >= 2) {
    WarpSearch search(tokens, options, block.suffix);
    // The first loads are under way before anybody waits for the suffix.
    search.load(group);
    if (thread < smaller<int32_t>(static_cast<int32_t>(options.max_n), tokens.length)) {
      block.suffix[thread] = tokens[tokens.length - 1 - thread];
    }
    __syncthreads();
    for (int32_t tile = group; tile < search.num_tiles() && search.look(tile);) {
      tile += groups;
      search.load(tile);
    }
    if (group == 0 && thread / kWarpSize == kLookupWarps - 1) search.look_at_edges();
    search.report(&block.best);
  }
  __syncthreads();
}

// Joins what the blocks of a request found. True in the last of them, for all its threads; block.best is then the
// request's. `workspace` may be null where there is one block.
//
// Every block arrives, also one without a tile: had they to agree on how many do, rows that change meanwhile (two
// requests with one row) could leave the counter astray for good.
__device__ inline bool join_blocks(void* workspace, LookupBlock& block) {
  const uint32_t groups = gridDim.y;
  if (groups == 1) return true;
  LookupShared* shared = static_cast<LookupShared*>(workspace) + blockIdx.x;
  if (threadIdx.x == 0) {
    if (block.best != 0) atomicMax(&shared->best, block.best);
    __threadfence();
    block.last = atomicInc(&shared->arrived, groups - 1) == groups - 1;
    if (block.last) {
      __threadfence();
      block.best = atomicExch(&shared->best, 0ull);
    }
  }
  __syncthreads();
  return block.last;
}

// One thread a slot; those without a draft get `unused`.
__device__ inline void write_draft(const LiveTokens& tokens, Occurrence found, const LookupOptions& options,
                                   int32_t unused, int32_t* draft, int32_t* num_draft, int32_t* match_len) {
  const int64_t count = num_drafts(found, tokens.length, options);
  const uint32_t j = threadIdx.x;
  if (j < options.k) {
    const auto end = static_cast<uint32_t>(found.end);
    draft[j] =
        j < count ? tokens[static_cast<int32_t>(draft_source(end, static_cast<uint32_t>(tokens.length), j))] : unused;
  }
  if (j == 0) {
    *num_draft = static_cast<int32_t>(count);
    *match_len = reported_len(found, count);
  }
}

// How many blocks share a row: enough to fill the device, no more than tiles fit into the row. Never from a length,
// which only the device knows.
inline int64_t groups_per_row(int64_t batch, int64_t capacity) {
  constexpr int64_t kBlocksPerMultiprocessor = 8;
  const int64_t fill = kBlocksPerMultiprocessor * num_multiprocessors() / batch;
  const int64_t tiles = (capacity + kTileTokens - 1) / kTileTokens;
  return larger<int64_t>(1, smaller(fill, tiles));
}

// Words of workspace that a lookup has a use for.
inline int64_t workspace_words(int64_t batch, int64_t capacity) {
  return groups_per_row(batch, capacity) > 1 ? lookup_workspace_words(batch) : 0;
}

// Block (i, g) is the g-th of request i. Without a workspace a request has one.
inline dim3 lookup_grid(int64_t batch, int64_t capacity, const void* workspace) {
  const int64_t groups = workspace != nullptr ? groups_per_row(batch, capacity) : 1;
  return dim3(static_cast<uint32_t>(batch), static_cast<uint32_t>(groups));
}

}  // namespace ngram_npu::cuda
