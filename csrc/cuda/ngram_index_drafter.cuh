// Drafts from an index, one block per request: what ngram_index_propose_ and ngram_index_step_ share.
#pragma once

#include "core/ngram_index_access.h"
#include "cuda/lookup.cuh"
#include "cuda/ngram_index.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr uint32_t kThreads = kLookupThreads;
constexpr uint32_t kWarps = kLookupWarps;
// What a call indexes of one row beyond what it appended. One block does that, and the others wait for it.
constexpr int64_t kCatchUpTokensPerRow = 256;
// Of a row with more ends than that to be indexed, no matter where, all tokens are read.
constexpr uint32_t kMostNewEnds = 2048;

// What is to be done about a row.
struct Plan {
  SlotState state;
  bool has_slot;
  uint32_t indexed;  // the ends below this one are in the table
  uint32_t upto;     // and those below this one will be, after this call
};

// What a block's threads tell each other. Each value they decide by is read from memory once: with one row or slot in
// two requests, against the contract, they would otherwise see different ones, and wait for each other for ever.
struct alignas(16) Shared {
  LiveRow live;
  Plan plan;
  int64_t num_sampled;  // ngram_index_step_'s
  LookupBlock lookup;
  Rank best[kWarps];
  uint32_t added[kWarps];
  bool full[kWarps];
};

// A request's row as it is looked up in, `num_appended` of its tokens by this call.
struct GrownRow {
  int64_t row;
  int64_t length;
  int64_t num_appended;
  bool asks;  // whether there is anything to look up
};

template <class Params>
__device__ Table open_table_for(const Params& p, const IndexAccess& index) {
  return p.lookup.max_n - p.lookup.min_n < kMaxIndexSpan ? open_table(index.words, index.num_words) : Table{};
}

// Decides what is to be done about request i, by the first warp. A barrier has to follow, and the appended tokens to be
// in the row behind it.
template <class Params>
__device__ void plan_request(const Params& p, const IndexAccess& index, int64_t catch_up_tokens, const Table& table,
                             int64_t i, const GrownRow& grown, Shared& shared) {
  if (threadIdx.x >= kWarpSize || !grown.asks) return;
  Plan plan{SlotState::kEmpty, false, 0, 0};
  const int64_t slot = index.slot_of(i, grown.row);
  if (table.has(slot) && grown.length <= kMaxIndexedTokens) {
    plan.has_slot = true;
    // The last token's own end is the question and cannot be an answer: it is indexed by the next call.
    const auto ends = static_cast<uint32_t>(grown.length - 1);
    const auto known = static_cast<uint32_t>(smaller<int64_t>(grown.length - grown.num_appended, ends));
    const uint32_t options = pack_options(p.lookup.min_n, p.lookup.max_n, p.lookup.match_policy);
    const SlotView view = view_slot(table, static_cast<uint32_t>(slot), options, p.token_ids[grown.row], known);
    plan.state = view.state;
    if (view.state <= SlotState::kRetry) {  // not given up, nor to be emptied
      plan.indexed = view.indexed;
      plan.upto = ends;
      if (catch_up_tokens >= 0) {
        const int64_t catch_up = smaller(catch_up_tokens, kCatchUpTokensPerRow);
        plan.upto = static_cast<uint32_t>(smaller<int64_t>(ends, view.indexed + catch_up + grown.num_appended));
      }
    }
  }
  if (threadIdx.x == 0) shared.plan = plan;
}

// The best of the ends first .. length - 2, by reading the row: a block's threads share them out.
__device__ inline Rank look_at_ends(const int32_t* tokens, uint32_t first, uint32_t length, const LookupOptions& look) {
  const int32_t newest = tokens[length - 1];
  Rank best = 0;
  for (uint32_t end = first + threadIdx.x; end < length - 1; end += kThreads) {
    if (tokens[end] != newest) continue;
    const uint32_t most = static_cast<uint32_t>(smaller<int64_t>(look.max_n, end + int64_t{1}));
    uint32_t len = 1;
    while (len < most && tokens[end - len] == tokens[length - 1 - len]) ++len;
    if (len < look.min_n) continue;
    best = larger(best, rank_of(static_cast<int32_t>(len), static_cast<int32_t>(end), look.match_policy == kLatest));
  }
  return best;
}

// Looks the row's end up where asked to, and enters its new ends: each gram by one warp. The two do not wait for each
// other: what is being entered is looked at by look_at_ends() as well, and what one sees of it are occurrences anyhow.
__device__ inline Rank work_on_table(const SlotGrams& mine, const Plan& plan, uint32_t length,
                                     const LookupOptions& look, bool looks_up, uint32_t* added, bool* full) {
  const uint32_t min_n = static_cast<uint32_t>(look.min_n);
  const uint32_t levels = static_cast<uint32_t>(look.max_n) - min_n + 1;
  const uint32_t lookups = looks_up ? levels : 0;
  const uint32_t tasks = lookups + (plan.upto - plan.indexed) * levels;
  Rank best = 0;
  for (uint32_t task = threadIdx.x / kWarpSize; task < tasks && !*full; task += kWarps) {
    const bool is_lookup = task < lookups;
    const uint32_t level = is_lookup ? task : (task - lookups) % levels;
    const uint32_t end = is_lookup ? length - 1 : plan.indexed + (task - lookups) / levels;
    const uint32_t n = min_n + level;
    if (end + 1 < n) continue;
    const Place place = place_of(mine.table, hash_gram(mine.tokens, end, n), mine.slot, mine.tenant, level);
    if (is_lookup) {
      uint32_t holder = 0;
      const uint32_t found = mine.find(place, *mine.at(place), end, n, length - 1, &holder);
      if (found == length - 1) continue;
      best = larger(best, rank_of(static_cast<int32_t>(n), static_cast<int32_t>(found), look.match_policy == kLatest));
    } else {
      *full = !mine.insert(place, end, n, plan.upto, added);
    }
  }
  return best;
}

// By the first warp, when all are done with the slot.
__device__ inline void update_slot(const Table& table, uint32_t slot_id, const Plan& plan, const int32_t* tokens,
                                   uint32_t options, uint32_t length, uint32_t added, bool full) {
  uint32_t* slot = table.slot(slot_id);
  note_indexed(table, slot_id, tokens, plan.upto);
  if (threadIdx.x != 0) return;
  if (plan.state <= SlotState::kRetry) {
    slot[kSlotGivenUp] = 0;
    slot[kSlotHeld] += added;
    if (added > 0) atomicAdd(table.header + kHeaderEntries, added);
    if (full) give_up_slot(table, slot_id);
  } else if (plan.state > SlotState::kGivenUp) {
    empty_slot(table, slot_id, plan.state);
  }
  slot[kSlotOptions] = options;
  const bool is_full = full || plan.state == SlotState::kGivenUp;
  count(table, is_full ? kStatScanFull : plan.upto + 1 < length ? kStatScanCatchUp : kStatIndexed);
}

// The answer for one row, known to all threads of the block; its slot indexes what is new.
__device__ inline Occurrence answer(const Table& table, int64_t slot, const Plan& plan, const LiveTokens& live,
                                    int64_t capacity, const LookupOptions& look, Shared& shared) {
  const uint32_t length = static_cast<uint32_t>(live.length), warp = threadIdx.x / kWarpSize;
  const uint32_t slot_id = static_cast<uint32_t>(slot);
  const bool drafts = may_draft(live.length, capacity, look);
  const bool reads_all = drafts && length - plan.indexed > kMostNewEnds;
  Rank best = 0;
  uint32_t added = 0;
  bool full = false;
  if (reads_all) {
    search_tiles(live, look, 0, INT32_MAX, shared.lookup);
    best = shared.lookup.best;
  } else if (drafts) {
    best = look_at_ends(live.row, plan.indexed, length, look);
  }
  if (plan.has_slot) {
    const uint32_t tenant = table.tenant(slot_id, __shfl_sync(kWholeWarp, table.generations[slot_id], 0));
    const SlotGrams mine{table, live.row, slot_id, tenant, look.match_policy};
    const bool looks_up = drafts && !reads_all && plan.indexed > 0;
    best = larger(best, work_on_table(mine, plan, length, look, looks_up, &added, &full));
  }
  for (int32_t step = kWarpSize / 2; step > 0; step /= 2) {
    best = larger(best, __shfl_xor_sync(kWholeWarp, best, step));
  }
  if (lane_id() == 0) {
    shared.best[warp] = best;
    shared.added[warp] = added;
    shared.full[warp] = full;
  }
  __syncthreads();
  added = 0;
  for (uint32_t w = 0; w < kWarps; ++w) {
    best = larger(best, shared.best[w]);
    added += shared.added[w];
    full = full || shared.full[w];
  }
  if (plan.has_slot && warp == 0) {
    const uint32_t options = pack_options(look.min_n, look.max_n, look.match_policy);
    update_slot(table, slot_id, plan, live.row, options, length, added, full);
  }
  return occurrence_of(best, live, look);
}

// Looks request i up and writes its draft, by all threads of the block.
template <class Params>
__device__ void draft_request(const Params& p, const IndexAccess& index, const Table& table, int64_t i,
                              const GrownRow& grown, Shared& shared) {
  LiveTokens live{p.token_ids.data, p.token_ids.data, 0, 0};
  Occurrence found{-1, 0};
  if (grown.asks) {
    live.row = live.sampled = p.token_ids[grown.row];
    live.in_row = live.length = static_cast<int32_t>(grown.length);
    found = answer(table, index.slot_of(i, grown.row), shared.plan, live, p.token_ids.capacity, p.lookup, shared);
    if (threadIdx.x == 0 && !shared.plan.has_slot && table.num_slots > 0) count(table, kStatScanOther);
  }
  write_draft(live, found, p.lookup, unused_token(p, i), p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i,
              p.match_len + i);
}

}  // namespace
}  // namespace ngram_npu::cuda
