// The division of each operator's work into launches: plan(params, machine). NGRAM_NPU_ASCENDC_OPS(X) calls
// X(op, Params) for each operator with a kernel; a launcher defines the C entry points `ngram_npu_ascendc_<op>` with
// it.
#pragma once

#include <cstddef>

#include "ascendc/launch_plan.h"
#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"

namespace ngram_npu::ascendc {

// Bytes that a core needs for searching: tokens; words of bits and of floats, named as in Searcher; a match.
constexpr int64_t search_ub_bytes(int64_t tile_tokens) {
  constexpr int64_t kBlock = 32;
  const int64_t words = tile_tokens / 32 * 4;
  const int64_t tiles = kTileBuffers * tile_tokens * 4;
  const int64_t starts_moved_carry_following = 5 * words + 2 * kBlock;
  const int64_t ranks_flags_scratch_best = 3 * words + kBlock;
  return tiles + starts_moved_carry_following + ranks_flags_scratch_best + kMatchInts * 4;
}

// Bytes of a request's row of ids and costs (Drafter in lookup.h).
template <class Params>
int64_t draft_row_bytes(const Params& p) {
  const int64_t ids = (p.lookup.k * p.draft_token_ids.bytes + 31) / 32 * 32;
  return ids + (p.draft_costs.data != nullptr ? kMaxDraftTokens : 0);
}

// Bytes for drafting, in ngram_step_, which needs more than ngram_propose: nine arrays, rounded up to 32 bytes each.
inline int64_t draft_ub_bytes(int64_t per_pass, int64_t spans, int64_t row_bytes) {
  return per_pass * (row_bytes + 4 * (spans * kMatchInts + 4 + kTokenPlace + kLengthPlace)) + 9 * 32;
}

// Shares with the maximum number of requests per pass with drafts that fit in addition to `other_bytes`; no cores if
// none fit.
inline Shares draft_shares(int64_t batch, int64_t spans, int64_t row_bytes, Machine machine, int64_t other_bytes) {
  machine.least_items = 1;  // one item is enough for a core, which has to read a row for it
  for (int64_t most = kMaxDrafting; most > 0; most /= 2) {
    const Shares shares = deal_out(batch, machine, most);
    if (can_run(machine, other_bytes + draft_ub_bytes(shares.per_pass, spans, row_bytes))) return shares;
  }
  return {};
}

// `spans` 0: the machine cannot run the lookup.
inline LookupTiling lookup_tiling(int64_t batch, int64_t capacity, int64_t row_bytes, const Machine& machine) {
  constexpr int64_t kTileTokens = 8448;  // 33 KB per copy; with the halo, a row of n * 8192 has n tiles
  constexpr int64_t kItemsPerCore = 2;   // evens out rows of different lengths; each costs its first loads
  if (!can_run(machine, search_ub_bytes(kTileUnit))) return {};
  LookupTiling t{};
  t.tile_tokens = kTileTokens;
  while (!can_run(machine, search_ub_bytes(t.tile_tokens))) t.tile_tokens = t.tile_tokens / 2 / kTileUnit * kTileUnit;
  const int64_t most = smaller(machine.vector_cores, larger<int64_t>((capacity + kMinSpan - 1) / kMinSpan, 1));
  t.spans = smaller((kItemsPerCore * machine.vector_cores + batch - 1) / larger<int64_t>(batch, 1), most);
  if (t.spans == 1 || capacity <= t.tile_tokens - 2 * kHalo) {
    t.requests = draft_shares(batch, 0, row_bytes, machine, search_ub_bytes(t.tile_tokens));
    if (t.requests.per_pass > 0) {
      t.launches = t.spans = 1;
      t.items = t.requests;
      return t;
    }
  }
  t.launches = 2;
  t.items = {1, smaller(machine.vector_cores, batch * t.spans)};
  t.requests = draft_shares(batch, t.spans, row_bytes, machine, 0);
  return t.requests.per_pass > 0 ? t : LookupTiling{};
}

struct LookupKernels {
  Kernel alone, search, draft;
};

template <class Params>
LaunchPlan plan_lookup(const Params& p, const Machine& machine, const LookupKernels& kernels) {
  const LookupTiling tiling = lookup_tiling(p.batch, p.token_ids.capacity, draft_row_bytes(p), machine);
  if (tiling.spans == 0) return {};
  LaunchPlan plan = plan_with(p, tiling);
  if (tiling.launches == 1) {
    plan.add(kernels.alone, tiling.items.cores);
    return plan;
  }
  plan.workspace_bytes = p.batch * tiling.spans * kMatchInts * int64_t{sizeof(int32_t)};
  plan.add(kernels.search, tiling.items.cores);
  plan.add(kernels.draft, tiling.requests.cores);
  return plan;
}

inline LaunchPlan plan(const NgramProposeParams& p, const Machine& machine) {
  return plan_lookup(
      p, machine,
      {Kernel::ngram_npu_ngram_propose, Kernel::ngram_npu_ngram_propose_search, Kernel::ngram_npu_ngram_propose_draft});
}

inline LaunchPlan plan(const NgramStepParams& p, const Machine& machine) {
  return plan_lookup(
      p, machine,
      {Kernel::ngram_npu_ngram_step, Kernel::ngram_npu_ngram_step_search, Kernel::ngram_npu_ngram_step_draft});
}

inline LaunchPlan plan(const PrepareNextTokenIdsParams& p, const Machine& machine) {
  constexpr int64_t kRequestInts = kTokenPlace + 3;  // sampled tokens; discard, both results
  return plan_requests(p, machine, kRequestInts * int64_t{sizeof(int32_t)}, 64,
                       Kernel::ngram_npu_prepare_next_token_ids);
}

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const Machine& machine) {
  return plan_requests(p, machine, 5 * int64_t{sizeof(int32_t)}, kMaxPerPass, Kernel::ngram_npu_prepare_inputs_padded);
}

inline LaunchPlan plan(const PrepareInputsParams& p, const Machine& machine) {
  if (!can_run(machine, (kMaxPerPass * 4 + kStretch * 3) * int64_t{sizeof(int32_t)})) return {};
  const BatchTiling tiling{deal_out(p.batch + 1, machine, kMaxPerPass), deal_out(p.total_tokens, machine, kMaxPerPass)};
  LaunchPlan plan = plan_with(p, tiling);
  plan.add(Kernel::ngram_npu_prepare_inputs, larger(tiling.requests.cores, tiling.tokens.cores));
  return plan;
}

inline LaunchPlan plan(const PrepareInputIdsParams& p, const Machine& machine) {
  constexpr int64_t kMaxRequests = 64;
  constexpr int64_t kRequestInts = 2;  // offset, number of drafts
  const Shares requests = deal_out(p.batch, machine, kMaxRequests);
  const int64_t row_ints = (smaller(p.draft_token_ids.capacity, kMaxDraftTokens) + 7) / 8 * 8;
  const int64_t pass_ints = requests.per_pass * (kRequestInts + row_ints) + 4 * 8 + kInputPieces * kInputPiece;
  const int64_t staged_bytes = whole_bytes(p.prev_positions, p.batch) + whole_bytes(p.draft_token_ids.rows, 4);
  if (!can_run(machine, staged_bytes + pass_ints * int64_t{sizeof(int32_t)})) return {};
  LaunchPlan plan = plan_with(p, requests);
  plan.add(Kernel::ngram_npu_prepare_input_ids, requests.cores);
  return plan;
}

// Bytes of a Gathered (gather.h); of PreviousCounts and a CountCorrector (counts.h); of a RequestPass without its
// CountCorrector and its Gathered (correction.cpp); of StagedSlots with both windows (slots.h).
inline int64_t gathered_bytes(int64_t size) { return smaller(size, kWhole) * int64_t{sizeof(int32_t)} + 32; }
inline int64_t previous_ub_bytes(const CorrectNumComputedTokensParams& p) { return 3 * gathered_bytes(p.num_previous); }
inline int64_t indices_ub_bytes(const IndexArray& indices, int64_t per_pass) {
  return per_pass * (4 + (indices.bytes == 8 ? 8 : 0)) + 2 * 32;
}
inline int64_t counts_ub_bytes(const CorrectNumComputedTokensParams& p, int64_t per_pass) {
  return indices_ub_bytes(p.prev_positions, per_pass) + 7 * (per_pass * 4 + 32);
}
inline int64_t requests_ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
  constexpr int64_t kHalfAndByte = 2 + 1;
  return indices_ub_bytes(p.row_indices, per_pass) + 6 * (per_pass * 4 + 32) + per_pass * kHalfAndByte + 2 * 32;
}
inline int64_t slots_ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
  constexpr int64_t kPlaceAndWindows = 32 + 2 * int64_t{sizeof(int64_t)};
  return whole_bytes(p.batch + 1, 4) + whole_bytes(p.row_indices, p.batch) + per_pass * kPlaceAndWindows + 2 * 32;
}

inline LaunchPlan plan(const CorrectNumComputedTokensParams& p, const Machine& machine) {
  const BatchTiling tiling{deal_out(p.batch, machine, kMaxPerPass), {}};
  if (!can_run(machine, previous_ub_bytes(p) + counts_ub_bytes(p, tiling.requests.per_pass))) return {};
  LaunchPlan plan = plan_with(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(int32_t)};
  plan.add(Kernel::ngram_npu_correct_num_computed_tokens, tiling.requests.cores);
  plan.add(Kernel::ngram_npu_place_num_computed_tokens, tiling.requests.cores);
  return plan;
}

inline LaunchPlan plan(const ComputeSlotMappingParams& p, const Machine& machine) {
  const Shares tokens = deal_out(p.num_slots, machine, kMaxSlotsPerPass);
  if (!can_run(machine, slots_ub_bytes(p, tokens.per_pass))) return {};
  LaunchPlan plan = plan_with(p, tokens);
  plan.add(Kernel::ngram_npu_compute_slot_mapping, tokens.cores);
  return plan;
}

// The second launch is that of correct_num_computed_tokens_, which reads only its own parameters.
static_assert(std::is_standard_layout_v<CorrectSpecStateParams> && offsetof(CorrectSpecStateParams, counts) == 0);

inline LaunchPlan plan(const CorrectSpecStateParams& p, const Machine& machine) {
  const int64_t tokens = larger(p.slots.num_positions, p.slots.num_slots);
  const BatchTiling tiling{deal_out(p.num_seq_lens, machine, kMaxSlotsPerPass),
                           deal_out(tokens, machine, kMaxSlotsPerPass)};
  const int64_t per_pass = tiling.requests.per_pass;
  const int64_t of_requests = counts_ub_bytes(p.counts, per_pass) + requests_ub_bytes(p.slots, per_pass);
  const int64_t of_tokens =
      counts_ub_bytes(p.counts, smaller(p.counts.batch, kCorrected)) + slots_ub_bytes(p.slots, tiling.tokens.per_pass);
  const int64_t looked_up = previous_ub_bytes(p.counts) + gathered_bytes(p.num_rows);
  if (!can_run(machine, of_requests + of_tokens + looked_up)) return {};
  LaunchPlan plan = plan_with(p, tiling);
  plan.workspace_bytes = p.counts.batch * int64_t{sizeof(int32_t)};
  plan.add(Kernel::ngram_npu_correct_spec_state, larger(tiling.requests.cores, tiling.tokens.cores));
  if (p.counts.batch > 0) plan.add(Kernel::ngram_npu_place_num_computed_tokens, tiling.requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc

#define NGRAM_NPU_ASCENDC_OPS(X)                                  \
  X(compute_slot_mapping_, ComputeSlotMappingParams)              \
  X(correct_num_computed_tokens_, CorrectNumComputedTokensParams) \
  X(correct_spec_state_, CorrectSpecStateParams)                  \
  X(ngram_propose, NgramProposeParams)                            \
  X(ngram_step_, NgramStepParams)                                 \
  X(prepare_input_ids_, PrepareInputIdsParams)                    \
  X(prepare_inputs, PrepareInputsParams)                          \
  X(prepare_inputs_padded, PrepareInputsPaddedParams)             \
  X(prepare_next_token_ids, PrepareNextTokenIdsParams)
