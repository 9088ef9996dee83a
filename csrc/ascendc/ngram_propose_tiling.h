#pragma once

#include "ascendc/lookup_tiling.h"
#include "core/ngram_propose.h"

namespace ngram_npu::ascendc {

inline LaunchPlan plan(const NgramProposeParams& p, const Machine& machine) {
  return plan_lookup(p, machine, Kernel::ngram_npu_ngram_propose_search, Kernel::ngram_npu_ngram_propose_draft);
}

}  // namespace ngram_npu::ascendc
