// How each operator's work is divided and launched: plan(params, machine). NGRAM_NPU_ASCENDC_OPS(X) calls X(op, Params)
// for each that has a kernel; a launcher makes the C entry points `ngram_npu_ascendc_<op>` of it.
#pragma once

#include <cstddef>

#include "ascendc/launch_plan.h"
#include "core/compute_slot_mapping.h"
#include "core/correct_num_computed_tokens.h"
#include "core/correct_spec_state.h"
#include "core/ngram_propose.h"
#include "core/ngram_step.h"
#include "core/prepare_input_ids.h"
#include "core/prepare_inputs.h"
#include "core/prepare_inputs_padded.h"
#include "core/prepare_next_token_ids.h"

namespace ngram_npu::ascendc {

// What a core of launch 1 keeps: tokens; words of bits and of floats, by the names they have in Searcher; a match.
constexpr int64_t search_ub_bytes(int64_t tile_tokens) {
  constexpr int64_t kBlock = 32;
  const int64_t words = tile_tokens / 32 * 4;
  const int64_t tiles = kTileBuffers * tile_tokens * 4;
  const int64_t starts_moved_carry_following = 5 * words + 2 * kBlock;
  const int64_t ranks_flags_scratch_best = 3 * words + kBlock;
  return tiles + starts_moved_carry_following + ranks_flags_scratch_best + kMatchInts * 4;
}

// And of launch 2, for ngram_step_, which needs more: eight arrays, each rounded up to 32 bytes.
constexpr int64_t draft_ub_bytes(int64_t per_pass, int64_t spans, int64_t k) {
  return per_pass * 4 * (spans * kMatchInts + k + 4 + kTokenPlace + kLengthPlace) + 8 * 32;
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
  plan.workspace_bytes = p.batch * tiling.spans * kMatchInts * int64_t{sizeof(int32_t)};
  plan.add(search, tiling.cores);
  plan.add(draft, tiling.requests.cores);
  return plan;
}

inline LaunchPlan plan(const NgramProposeParams& p, const Machine& machine) {
  return plan_lookup(p, machine, Kernel::ngram_npu_ngram_propose_search, Kernel::ngram_npu_ngram_propose_draft);
}

inline LaunchPlan plan(const NgramStepParams& p, const Machine& machine) {
  return plan_lookup(p, machine, Kernel::ngram_npu_ngram_step_search, Kernel::ngram_npu_ngram_step_draft);
}

inline LaunchPlan plan(const PrepareNextTokenIdsParams& p, const Machine& machine) {
  return plan_requests(p, machine, 2 * int64_t{sizeof(int32_t)}, Kernel::ngram_npu_prepare_next_token_ids);
}

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const Machine& machine) {
  return plan_requests(p, machine, 2 * int64_t{sizeof(int32_t)}, Kernel::ngram_npu_prepare_inputs_padded);
}

inline LaunchPlan plan(const PrepareInputsParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 3 * int64_t{sizeof(int32_t)} + 2 * kStretchBytes)) return {};
  const BatchTiling tiling{deal_out(p.batch + 1, machine, kMaxPerPass), deal_out(p.total_tokens, machine, kMaxPerPass)};
  LaunchPlan plan = plan_with(p, tiling);
  plan.add(Kernel::ngram_npu_prepare_inputs, larger(tiling.requests.cores, tiling.tokens.cores));
  return plan;
}

inline LaunchPlan plan(const PrepareInputIdsParams& p, const Machine& machine) {
  if (!can_run(machine, kInputPieces * kInputPiece * int64_t{sizeof(int32_t)})) return {};
  const Shares requests = deal_out(p.batch, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, requests);
  plan.add(Kernel::ngram_npu_prepare_input_ids, requests.cores);
  return plan;
}

inline LaunchPlan plan(const CorrectNumComputedTokensParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 2 * int64_t{sizeof(int32_t)})) return {};
  const BatchTiling tiling{deal_out(p.batch, machine, kMaxPerPass), {}};
  LaunchPlan plan = plan_with(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(int32_t)};
  plan.add(Kernel::ngram_npu_correct_num_computed_tokens, tiling.requests.cores);
  plan.add(Kernel::ngram_npu_place_num_computed_tokens, tiling.requests.cores);
  return plan;
}

inline LaunchPlan plan(const ComputeSlotMappingParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 2 * int64_t{sizeof(int64_t)} + kStretchBytes)) return {};
  const Shares tokens = deal_out(p.num_slots, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, tokens);
  plan.add(Kernel::ngram_npu_compute_slot_mapping, tokens.cores);
  return plan;
}

// The second launch is correct_num_computed_tokens_'s and reads no further than its parameters.
static_assert(std::is_standard_layout_v<CorrectSpecStateParams> && offsetof(CorrectSpecStateParams, counts) == 0);

inline LaunchPlan plan(const CorrectSpecStateParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * int64_t{3 * sizeof(int32_t) + 1 + 2 * sizeof(int64_t)} + kStretchBytes))
    return {};
  const BatchTiling tiling{deal_out(p.num_seq_lens, machine, kMaxPerPass),
                           deal_out(larger(p.slots.num_positions, p.slots.num_slots), machine, kMaxPerPass)};
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
