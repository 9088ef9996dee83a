#include "core/ngram_index_step_.h"
#include "cuda/lookup.cuh"
#include "cuda/ngram_index.cuh"
#include "cuda/sampled.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr uint32_t kThreads = kLookupThreads;
constexpr uint32_t kWarps = kLookupWarps;
// What a step indexes of one row beyond what it appended. One block does that, and the others wait for it.
constexpr int64_t kCatchUpTokensPerRow = 256;
// Of a row with more ends than that to be indexed, no matter where, all tokens are read.
constexpr uint32_t kMostNewEnds = 2048;

// What is to be done about a row.
struct Plan {
  SlotState state;
  bool has_slot;
  uint32_t indexed;  // the ends below this one are in the table
  uint32_t upto;     // and those below this one will be, after this step
};

// What a block's threads tell each other. Each value they decide by is read from memory once: with one row or slot in
// two requests, against the contract, they would otherwise see different ones, and wait for each other for ever.
struct alignas(16) Shared {
  LiveRow live;
  Plan plan;
  int64_t num_sampled;
  LookupBlock lookup;
  Rank best[kWarps];
  uint32_t added[kWarps];
  bool full[kWarps];
};

// By a warp.
__device__ Plan plan_row(const NgramIndexStepParams& p, const Table& table, const Accepted& a, int64_t slot,
                         uint32_t length, uint32_t options) {
  Plan plan{SlotState::kEmpty, false, 0, 0};
  if (!table.has(slot) || length > kMaxIndexedTokens) return plan;
  plan.has_slot = true;
  // The last token's own end is the question and cannot be an answer: it is indexed by the next step.
  const uint32_t ends = length - 1;
  const uint32_t known = static_cast<uint32_t>(smaller<int64_t>(a.old_length, ends));
  const SlotView view = view_slot(table, static_cast<uint32_t>(slot), options, p.step.token_ids[a.row], known);
  plan.state = view.state;
  if (view.state > SlotState::kRetry) return plan;  // given up, or to be emptied
  plan.indexed = view.indexed;
  plan.upto = ends;
  if (p.catch_up_tokens >= 0) {
    const int64_t most = view.indexed + smaller(p.catch_up_tokens, kCatchUpTokensPerRow) + a.num_appended;
    plan.upto = static_cast<uint32_t>(smaller<int64_t>(ends, most));
  }
  return plan;
}

// The best of the ends first .. length - 2, by reading the row: a block's threads share them out.
__device__ Rank look_at_ends(const int32_t* tokens, uint32_t first, uint32_t length, const LookupOptions& look) {
  const int32_t newest = tokens[length - 1];
  Rank best = 0;
  for (uint32_t end = first + threadIdx.x; end < length - 1; end += kThreads) {
    if (tokens[end] != newest) continue;
    const uint32_t most = static_cast<uint32_t>(smaller<int64_t>(look.max_n, end + int64_t{1}));
    uint32_t len = 1;
    while (len < most && tokens[end - len] == tokens[length - 1 - len]) ++len;
    if (len < look.min_n) continue;
    best = larger(best, rank_of(static_cast<int32_t>(len), static_cast<int32_t>(end), look.match == kLatest));
  }
  return best;
}

// Looks the row's end up where asked to, and enters its new ends: each gram by one warp. The two do not wait for each
// other: what is being entered is looked at by look_at_ends() as well, and what one sees of it are occurrences anyhow.
__device__ Rank work_on_table(const SlotTable& mine, const Plan& plan, uint32_t length, const LookupOptions& look,
                              bool looks_up, uint32_t* added, bool* full) {
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
      best = larger(best, rank_of(static_cast<int32_t>(n), static_cast<int32_t>(found), look.match == kLatest));
    } else {
      *full = !mine.insert(place, end, n, plan.upto, added);
    }
  }
  return best;
}

// By the first warp, when all are done with the slot.
__device__ void update_slot(const Table& table, uint32_t slot_id, const Plan& plan, const int32_t* tokens,
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
__device__ Occurrence answer(const NgramIndexStepParams& p, const Table& table, int64_t slot, const Plan& plan,
                             const LiveTokens& live, Shared& shared) {
  const LookupOptions& look = p.step.lookup;
  const uint32_t length = static_cast<uint32_t>(live.length), warp = threadIdx.x / kWarpSize;
  const uint32_t slot_id = static_cast<uint32_t>(slot);
  const bool drafts = may_draft(live.length, p.step.token_ids.capacity, look);
  const bool reads_all = drafts && length - plan.indexed > kMostNewEnds;
  Rank best = 0;
  uint32_t added = 0;
  bool full = false;
  if (reads_all) {
    search_tiles(live, look, 0, 1, shared.lookup);
    best = shared.lookup.best;
  } else if (drafts) {
    best = look_at_ends(live.row, plan.indexed, length, look);
  }
  if (plan.has_slot) {
    const uint32_t tenant = table.tenant(slot_id, __shfl_sync(kWholeWarp, table.generations[slot_id], 0));
    const SlotTable mine{table, live.row, slot_id, tenant, look.match};
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
    const uint32_t options = pack_options(look.min_n, look.max_n, look.match);
    update_slot(table, slot_id, plan, live.row, options, length, added, full);
  }
  return occurrence_of(best, live, look);
}

// One block a request.
__global__ void __launch_bounds__(kThreads, 3) ngram_index_step_kernel(const __grid_constant__ NgramIndexStepParams p) {
  __shared__ Shared shared;
  const NgramStepParams& s = p.step;
  const int64_t i = blockIdx.x;
  const uint32_t thread = threadIdx.x;
  const bool has_levels = s.lookup.max_n - s.lookup.min_n < kMaxIndexSpan;
  const Table table = has_levels ? open_table(p.index, p.index_words) : Table{};
  if (thread == kWarpSize) shared.live = live_row(s, i);  // beside warp 0, whose loads need not wait for these
  if (thread < kWarpSize) {
    const int64_t run = leading_run_by_warp(s.sampled_token_ids[i], s.sampled_token_ids.capacity, s.vocab_size);
    if (thread == 0) shared.num_sampled = discarded(s, i) ? 0 : run;
  }
  __syncthreads();

  const Accepted a = accept(s, i, shared.live, shared.num_sampled);
  const int64_t length = a.old_length + a.num_appended;
  const bool asks = drafts(a) && can_look_up(length, s.token_ids.capacity);
  const int64_t slot = p.slot_indices.bytes != 0 ? p.slot_indices[i] : a.row;
  if (thread < kWarpSize && asks) {
    const uint32_t options = pack_options(s.lookup.min_n, s.lookup.max_n, s.lookup.match);
    const Plan plan = plan_row(p, table, a, slot, static_cast<uint32_t>(length), options);
    if (thread == 0) shared.plan = plan;
  }
  if (thread < a.num_appended) s.token_ids[a.row][a.old_length + thread] = s.sampled_token_ids[i][thread];
  __syncthreads();

  if (thread == 0) {
    s.next_token_ids[i] = a.next_token;
    s.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    if (s.advance && a.num_appended > 0) s.num_tokens[a.row] = static_cast<int32_t>(length);
  }
  LiveTokens live{s.token_ids.data, s.token_ids.data, 0, 0};
  Occurrence found{-1, 0};
  if (asks) {
    const auto known = static_cast<int32_t>(length);
    live = {s.token_ids[a.row], s.token_ids[a.row], known, known};
    found = answer(p, table, slot, shared.plan, live, shared);
    if (thread == 0 && !shared.plan.has_slot && table.num_slots > 0) count(table, kStatScanOther);
  }
  write_draft(live, found, s.lookup, s.draft_token_ids + i * s.lookup.k, s.num_draft_tokens + i, s.match_len + i);
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_step_(const NgramIndexStepParams* params, void* stream) {
  const int64_t batch = params->step.batch;
  if (batch < 1 || batch > INT32_MAX) return kInvalidParams;
  return cuda::launch(cuda::ngram_index_step_kernel, dim3(static_cast<uint32_t>(batch)), cuda::kThreads, stream,
                      *params);
}
