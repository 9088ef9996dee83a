#pragma once

#include "ascendc/launch_plan.h"
#include "core/prepare_input_ids_.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const PrepareInputIdsParams& p, const Machine& machine) {
  if (!can_run(machine, kInputPieces * kInputPiece * int64_t{sizeof(int32_t)})) return {};
  const Shares requests = deal_out(p.batch, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, requests);
  plan.add(Kernel::ngram_npu_prepare_input_ids, requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
