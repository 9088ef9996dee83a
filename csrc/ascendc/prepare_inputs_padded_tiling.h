#pragma once

#include "ascendc/launch_plan.h"
#include "core/prepare_inputs_padded.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const Machine& machine) {
  constexpr int64_t kMaxPerPass = 1024;
  if (!can_run(machine, 2 * kMaxPerPass * int64_t{sizeof(int32_t)})) return {};
  const Shares requests = deal_out(p.batch, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, requests);
  plan.add(Kernel::ngram_npu_prepare_inputs_padded, requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
