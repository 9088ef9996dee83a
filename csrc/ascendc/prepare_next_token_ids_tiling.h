#pragma once

#include "ascendc/launch_plan.h"
#include "core/prepare_next_token_ids.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const PrepareNextTokenIdsParams& p, const Machine& machine) {
  return plan_requests(p, machine, 2 * int64_t{sizeof(int32_t)}, Kernel::ngram_npu_prepare_next_token_ids);
}

}  // namespace ngram_npu::ascendc
