// ngram_index_step_: ngram_step_ with an index. Contract: docs/ops/ngram_index_step.md.
#pragma once

#include "core/ngram_index_propose.h"
#include "core/ngram_step.h"

namespace ngram_npu {

struct NgramIndexStepParams {
  NgramStepParams step;  // its executor is not used: one thread is fastest here
  IndexAccess index;
  int64_t catch_up_tokens;  // as in NgramIndexProposeParams
  LadderOptions ladder;
};

}  // namespace ngram_npu
