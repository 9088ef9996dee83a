#pragma once

#include "ascendc/lookup_tiling.h"
#include "core/ngram_step_.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const NgramStepParams& p, const Machine& machine) {
  return plan_lookup(p, machine, Kernel::ngram_npu_ngram_step_search, Kernel::ngram_npu_ngram_step_draft);
}

}  // namespace ngram_npu::ascendc
