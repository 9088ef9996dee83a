#pragma once

#include "ascendc/launch_plan.h"
#include "core/prepare_inputs_padded.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const Machine& machine) {
  return plan_requests(p, machine, 2 * int64_t{sizeof(int32_t)}, Kernel::ngram_npu_prepare_inputs_padded);
}

}  // namespace ngram_npu::ascendc
