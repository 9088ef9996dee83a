#pragma once

#include <cstddef>

#include "ascendc/launch_plan.h"
#include "core/correct_spec_state_.h"

namespace ngram_npu::ascendc {

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
