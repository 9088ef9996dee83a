// ngram_index_reset_: forget what slots hold. Contract: docs/ops/ngram_index_reset_.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

struct NgramIndexResetParams {
  IndexArray slot_indices;  // [count], present
  int64_t count;
  int32_t* index;
  int64_t index_words;
};

}  // namespace ngram_npu
