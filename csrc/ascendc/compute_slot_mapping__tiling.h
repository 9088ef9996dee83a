#pragma once

#include "ascendc/launch_plan.h"
#include "core/compute_slot_mapping_.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const ComputeSlotMappingParams& p, const Machine& machine) {
  if (!can_run(machine, kMaxPerPass * 2 * int64_t{sizeof(int64_t)} + kStretchBytes)) return {};
  const Shares tokens = deal_out(p.num_slots, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, tokens);
  plan.add(Kernel::ngram_npu_compute_slot_mapping, tokens.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
