// How the lookup of ngram_propose and ngram_step_ is divided.
#pragma once

#include "ascendc/launch_plan.h"
#include "core/lookup.h"

namespace ngram_npu::ascendc {

// What a core of launch 1 keeps: tokens; words of bits and of floats, by the names they have in Searcher; a slot.
constexpr int64_t search_ub_bytes(int64_t tile_tokens) {
  constexpr int64_t kBlock = 32;
  const int64_t words = tile_tokens / 32 * 4;
  const int64_t tiles = kTileBuffers * tile_tokens * 4;
  const int64_t starts_moved_carry_following = 5 * words + 2 * kBlock;
  const int64_t ranks_flags_scratch_best = 3 * words + kBlock;
  return tiles + starts_moved_carry_following + ranks_flags_scratch_best + kSlotInts * 4;
}

// And of launch 2, for ngram_step_, which needs more: eight arrays, each rounded up to 32 bytes.
constexpr int64_t draft_ub_bytes(int64_t per_pass, int64_t spans, int64_t k) {
  return per_pass * 4 * (spans * kSlotInts + k + 4 + kTokenPlace + kLengthPlace) + 8 * 32;
}

// `spans` 0: the machine cannot carry it out.
inline LookupTiling lookup_tiling(int64_t batch, int64_t capacity, int64_t k, const Machine& machine) {
  constexpr int64_t kTileTokens = 8192;  // 32 KB a copy
  constexpr int64_t kItemsPerCore = 4;   // evens out rows of different lengths
  constexpr int64_t kMaxRequests = 32;
  if (!can_run(machine, search_ub_bytes(kTileUnit + kHalo))) return {};
  LookupTiling t{};
  t.tile_tokens = kTileTokens;
  while (!can_run(machine, search_ub_bytes(t.tile_tokens))) t.tile_tokens /= 2;
  const int64_t most = smaller(machine.vector_cores, larger<int64_t>((capacity + kMinSpan - 1) / kMinSpan, 1));
  t.spans = smaller((kItemsPerCore * machine.vector_cores + batch - 1) / larger<int64_t>(batch, 1), most);
  t.cores = smaller(machine.vector_cores, batch * t.spans);
  for (int64_t most_requests = kMaxRequests; most_requests > 0; most_requests /= 2) {
    t.requests = deal_out(batch, machine, most_requests);
    if (can_run(machine, draft_ub_bytes(t.requests.per_pass, t.spans, k))) return t;
  }
  return {};
}

template <class Params>
LaunchPlan plan_lookup(const Params& p, const Machine& machine, Kernel search, Kernel draft) {
  const LookupTiling tiling = lookup_tiling(p.batch, p.token_ids.capacity, p.lookup.k, machine);
  if (tiling.spans == 0) return {};
  LaunchPlan plan = plan_with(p, tiling);
  plan.workspace_bytes = p.batch * tiling.spans * kSlotInts * int64_t{sizeof(int32_t)};
  plan.add(search, tiling.cores);
  plan.add(draft, tiling.requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
