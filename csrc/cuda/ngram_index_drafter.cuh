// Drafts from an index, one block per request: what ngram_index_propose_ and ngram_index_step_ share.
#pragma once

#include "core/ngram_index_access.h"
#include "core/ngram_propose.h"
#include "core/ngram_step.h"
#include "cuda/lookup.cuh"
#include "cuda/ngram_index.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kBlocks = 8;  // of a multiprocessor: a large batch is one wave
// What a call indexes of one row beyond what it appended. One block does that, and the others wait for it.
constexpr int64_t kCatchUpTokensPerRow = 256;
constexpr int32_t kScanBlocks = 3;  // of a multiprocessor, in the scan: with more, nvcc spills registers
// A row with more ends than that to be indexed, no matter where, is scanned: by a launch of all blocks.
constexpr uint32_t kMostNewEnds = 2048;
// A match_len until its request's row was scanned; num_draft_tokens then has both counts, until all blocks are done.
constexpr int32_t kToScan = -1;
constexpr int32_t kCountBits = 8;
static_assert(kMaxDraftTokens < 1 << kCountBits);

// What is to be done about a row.
struct Plan {
  SlotState state;
  bool has_slot;
  uint32_t indexed;  // the ends below this one are in the table
  uint32_t upto;     // and those below this one will be, after this call
};

// What a block's threads tell each other. Each value they decide by is read from memory once: with one row or slot in
// two requests, against the contract, they would otherwise see different ones, and wait for each other for ever.
struct Shared {
  LiveRow live;
  int64_t num_sampled;             // ngram_index_step_'s
  int32_t slot;                    // -1: the table has none
  uint32_t words[kSlotWords + 1];  // the slot's, and its generation
  Plan plan;
  int32_t suffix[kMaxNgram];  // the row's last tokens, the newest first
  Rank best;
  uint32_t added;  // entries
  uint32_t full;   // warps that found no room
};

// Reads what hangs on nothing but the request's number, each warp its own: behind a barrier, the block knows it.
template <class Params>
__device__ Table open_request(const Params& p, const IndexAccess& index, int64_t i, Shared& shared) {
  const uint32_t warp = threadIdx.x / kWarpSize, lane = lane_id();
  if (threadIdx.x == kWarpSize) shared.live = live_row(p, i);
  const bool is_row = index.slot_indices.bytes == 0;  // then, and only then, the row is read for it
  const int64_t slot = warp == 2 ? index.slot_of(i, is_row ? p.row_indices[i] : 0) : -1;
  const bool fits = p.lookup.max_n - p.lookup.min_n < kMaxIndexSpan;
  const Table table = fits ? open_table(index.words, index.num_words) : Table{};
  if (warp == 2) {
    const bool has_slot = table.has(slot);
    if (lane == 0) shared.slot = has_slot ? static_cast<int32_t>(slot) : -1;
    if (has_slot && lane <= kSlotWords) {
      const uint32_t* words = table.slot(static_cast<uint32_t>(slot));
      shared.words[lane] = *(lane < kSlotWords ? words + lane : table.generations + slot);
    }
  }
  if (threadIdx.x == kThreads - 1) {
    shared.best = 0;
    shared.added = shared.full = 0;
  }
  return table;
}

// Decides what is to be done about a request with these tokens (none: there is nothing to look up), by the first warp,
// while the others get the row's last tokens. A barrier has to follow, and the appended tokens to be in the row behind
// it.
template <class Params>
__device__ void plan_request(const Params& p, int64_t catch_up_tokens, const Table& table, const LiveTokens& tokens,
                             Shared& shared) {
  if (tokens.length == 0) return;
  const int32_t length = tokens.length, place = static_cast<int32_t>(threadIdx.x) - kWarpSize;
  if (place >= 0) {
    if (place < smaller<int64_t>(p.lookup.max_n, length)) shared.suffix[place] = tokens[length - 1 - place];
    return;
  }
  Plan plan{SlotState::kEmpty, false, 0, 0};
  if (shared.slot >= 0 && length <= static_cast<int64_t>(kMaxIndexedTokens)) {
    plan.has_slot = true;
    // The last token's own end is the question and cannot be an answer: it is indexed by the next call.
    const auto ends = static_cast<uint32_t>(length - 1);
    const uint32_t known = smaller(static_cast<uint32_t>(tokens.in_row), ends);
    const uint32_t options = pack_options(p.lookup.min_n, p.lookup.max_n, p.lookup.match_policy);
    const SlotView view = view_slot(table, shared.words[lane_id() % kSlotWords], options, tokens.row, known);
    plan.state = view.state;
    if (view.state <= SlotState::kRetry) {  // not given up, nor to be emptied
      plan.indexed = view.indexed;
      plan.upto = ends;
      if (catch_up_tokens >= 0) {
        const int64_t catch_up = smaller(catch_up_tokens, kCatchUpTokensPerRow);
        plan.upto = static_cast<uint32_t>(smaller<int64_t>(ends, view.indexed + catch_up + length - tokens.in_row));
      }
    }
  }
  if (threadIdx.x == 0) shared.plan = plan;
}

// The best of the ends first .. length - 2, by reading the row: a block's threads share them out, the last ones first,
// since the others look at the table as well.
__device__ inline Rank look_at_ends(const LiveTokens& tokens, uint32_t first, const LookupOptions& look,
                                    const int32_t* suffix) {
  Rank best = 0;
  for (uint32_t end = first + (kThreads - 1 - threadIdx.x); end + 1 < static_cast<uint32_t>(tokens.length);
       end += kThreads) {
    const uint32_t most = static_cast<uint32_t>(smaller<int64_t>(look.max_n, end + int64_t{1}));
    uint32_t len = 0;
    while (len < most && tokens[static_cast<int32_t>(end - len)] == suffix[len]) ++len;
    if (len < look.min_n) continue;
    best = larger(best, rank_of(static_cast<int32_t>(len), static_cast<int32_t>(end), look.match_policy == kLatest));
  }
  return best;
}

// The best that the table knows: each gram at the row's end by one warp.
__device__ inline Rank look_at_table(const SlotGrams& mine, uint32_t length, const LookupOptions& look,
                                     const int32_t* suffix) {
  const uint32_t min_n = static_cast<uint32_t>(look.min_n);
  const uint32_t max_n = static_cast<uint32_t>(smaller<int64_t>(look.max_n, length));
  Rank best = 0;
  for (uint32_t n = min_n + threadIdx.x / kWarpSize; n <= max_n; n += kWarps) {
    GramHash hash;
    for (uint32_t j = 0; j < n; ++j) hash.take(suffix[j]);
    const Place place = place_of(mine.table, hash, mine.slot, mine.tenant, n - min_n);
    uint32_t holder = 0;
    const uint32_t end = mine.find(place, *mine.at(place), length - 1, n, length - 1, &holder);
    if (end == length - 1) continue;
    best = larger(best, rank_of(static_cast<int32_t>(n), static_cast<int32_t>(end), look.match_policy == kLatest));
  }
  return best;
}

// Enters the row's new ends: each gram by one warp.
__device__ inline void enter_ends(const SlotGrams& mine, const Plan& plan, const LookupOptions& look, Shared& shared) {
  const uint32_t min_n = static_cast<uint32_t>(look.min_n);
  const uint32_t levels = static_cast<uint32_t>(look.max_n) - min_n + 1;
  const uint32_t tasks = (plan.upto - plan.indexed) * levels;
  uint32_t added = 0;
  bool full = false;
  for (uint32_t task = threadIdx.x / kWarpSize; task < tasks && !full; task += kWarps) {
    const uint32_t level = task % levels, end = plan.indexed + task / levels, n = min_n + level;
    if (end + 1 < n) continue;
    const Place place = place_of(mine.table, hash_gram(mine.tokens, end, n), mine.slot, mine.tenant, level);
    full = !mine.insert(place, end, n, plan.upto, &added);
  }
  if (lane_id() != 0) return;
  if (added > 0) atomicAdd(&shared.added, added);
  if (full) atomicAdd(&shared.full, 1u);
}

// By the first warp, when all are done with the slot.
__device__ inline void update_slot(const SlotGrams& mine, const Plan& plan, uint32_t options, uint32_t length,
                                   uint32_t added, bool full) {
  const Table& table = mine.table;
  uint32_t* slot = table.slot(mine.slot);
  note_indexed(table, mine.slot, mine.tokens, plan.upto);
  if (threadIdx.x != 0) return;
  if (plan.state <= SlotState::kRetry) {
    slot[kSlotGivenUp] = 0;
    slot[kSlotHeld] += added;
    if (added > 0) atomicAdd(table.header + kHeaderEntries, added);
    if (full) give_up_slot(table, mine.slot);
  } else if (plan.state > SlotState::kGivenUp) {
    empty_slot(table, mine.slot, plan.state);
  }
  slot[kSlotOptions] = options;
  const bool is_full = full || plan.state == SlotState::kGivenUp;
  count(table, is_full ? kStatScanFull : plan.upto + 1 < length ? kStatScanCatchUp : kStatIndexed);
}

// Looks request i up and writes its draft, or that its row is to be scanned; then its slot indexes what is new. By all
// threads of the block. What is being entered by other blocks are occurrences anyhow.
template <class Params>
__device__ void draft_request(const Params& p, const Table& table, int64_t i, const LiveTokens& tokens,
                              Shared& shared) {
  const LookupOptions& look = p.lookup;
  const auto length = static_cast<uint32_t>(tokens.length), slot = static_cast<uint32_t>(shared.slot);
  const Plan plan = tokens.length > 0 ? shared.plan : Plan{};
  const SlotGrams mine{table, tokens.row, slot, plan.has_slot ? table.tenant(slot, shared.words[kSlotWords]) : 0,
                       look.match_policy};
  const bool drafts = may_draft(tokens.length, p.token_ids.capacity, look);
  if (drafts && length - plan.indexed > kMostNewEnds) {
    if (threadIdx.x == 0) p.match_len[i] = kToScan;
  } else {
    Rank best = 0;
    if (drafts) best = look_at_ends(tokens, plan.indexed, look, shared.suffix);
    if (drafts && plan.indexed > 0) best = larger(best, look_at_table(mine, length, look, shared.suffix));
    for (int32_t step = kWarpSize / 2; step > 0; step /= 2) {
      best = larger(best, __shfl_xor_sync(kWholeWarp, best, step));
    }
    if (lane_id() == 0 && best != 0) atomicMax(&shared.best, best);
    __syncthreads();
    write_draft(p, i, tokens, occurrence_of(shared.best, tokens, look), p.num_draft_tokens + i, p.match_len + i);
  }
  if (!plan.has_slot) {
    if (threadIdx.x == 0 && tokens.length > 0 && table.num_slots > 0) count(table, kStatScanOther);
    return;
  }
  enter_ends(mine, plan, look, shared);
  __syncthreads();
  const uint32_t options = pack_options(look.min_n, look.max_n, look.match_policy);
  if (threadIdx.x < kWarpSize) update_slot(mine, plan, options, length, shared.added, shared.full != 0);
}

// A request's row once the first launch is done.
__device__ inline LiveRow grown_row(const NgramProposeParams& p, int64_t i) { return live_row(p, i); }
__device__ inline LiveRow grown_row(const NgramStepParams& p, int64_t i) {
  const LiveRow live = live_row(p, i);
  if (p.advance || live.row < 0) return live;
  return {live.row, live.length + appended(p.num_sampled[i], live.length, p.token_ids.capacity)};
}

// The rows to be scanned, of those of a batch.
template <class Params>
struct ScanLookup {
  const Params& p;

  __device__ bool scans(int64_t i) const { return p.match_len[i] == kToScan; }
  __device__ LiveRow row(int64_t i) const { return scans(i) ? grown_row(p, i) : LiveRow{}; }
  __device__ int64_t length(int64_t i) const { return row(i).length; }
  __device__ LiveTokens tokens(int64_t i) const { return whole_row(p, row(i)); }
  __device__ void finish(int64_t i, const LiveTokens& tokens, Occurrence found) const {
    if (!scans(i)) return;
    int32_t num_draft = 0, match_len = 0;
    write_draft(p, i, tokens, found, &num_draft, &match_len);
    if (threadIdx.x == 0) p.num_draft_tokens[i] = num_draft | match_len << kCountBits;
  }
  __device__ void settle(int64_t i) const {
    if (!scans(i)) return;
    p.match_len[i] = p.num_draft_tokens[i] >> kCountBits;
    p.num_draft_tokens[i] &= (1 << kCountBits) - 1;
  }
};

__device__ inline LookupBlock& scan_block() {  // not in the template, whose instances the twin could not tell apart
  __shared__ LookupBlock block;
  return block;
}

template <class Params>
__global__ void __launch_bounds__(kLookupThreads, kScanBlocks)
    ngram_index_scan_kernel(const __grid_constant__ Params p) {
  const ScanLookup<Params> lookup{p};
  bool any = false;
  for (int64_t i = threadIdx.x; i < p.batch; i += kLookupThreads) any |= lookup.scans(i);
  if (__syncthreads_or(any)) look_up_all(lookup, p, scan_block());
}

// Two launches: `kernel`, then the scan, which mostly has nothing to do. `lookup` is a part of `params`.
template <class Params, class Lookup>
int32_t launch_drafter(void (*kernel)(Params), const Params& params, const Lookup& lookup, void* stream) {
  const auto scan = ngram_index_scan_kernel<Lookup>;
  if (!can_launch_lookup(lookup_grid(scan, lookup), lookup)) return kInvalidParams;
  const int32_t status = launch(kernel, dim3(static_cast<uint32_t>(lookup.batch)), kThreads, stream, params);
  return status == kOk ? launch_lookup(scan, lookup, stream) : status;
}

}  // namespace
}  // namespace ngram_npu::cuda
