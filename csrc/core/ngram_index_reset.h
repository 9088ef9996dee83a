// ngram_index_reset_: empty slots. Contract: docs/ops/ngram_index_reset.md.
#pragma once

#include "core/ngram_index_layout.h"

namespace ngram_npu {

struct NgramIndexResetParams {
  IndexAccess index;  // its slot_indices: [count], present
  int64_t count;
};

}  // namespace ngram_npu
