#pragma once

#include "ascendc/launch_plan.h"
#include "core/correct_num_computed_tokens_.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const CorrectNumComputedTokensParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 2 * int64_t{sizeof(int32_t)})) return {};
  const BatchTiling tiling{deal_out(p.batch, machine, kMaxPerPass), {}};
  LaunchPlan plan = plan_with(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(int32_t)};
  plan.add(Kernel::ngram_npu_correct_num_computed_tokens, tiling.requests.cores);
  plan.add(Kernel::ngram_npu_place_num_computed_tokens, tiling.requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
