#pragma once

#include "ascendc/launch_plan.h"
#include "core/prepare_inputs.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const PrepareInputsParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 3 * int64_t{sizeof(int32_t)} + 2 * kStretchBytes)) return {};
  const BatchTiling tiling{deal_out(p.batch + 1, machine, kMaxPerPass), deal_out(p.total_tokens, machine, kMaxPerPass)};
  LaunchPlan plan = plan_with(p, tiling);
  plan.add(Kernel::ngram_npu_prepare_inputs, larger(tiling.requests.cores, tiling.tokens.cores));
  return plan;
}

}  // namespace ngram_npu::ascendc
