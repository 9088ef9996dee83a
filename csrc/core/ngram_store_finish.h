// ngram_store_finish_: finish requests. Contract: docs/ops/ngram_store_finish.md.
#pragma once

#include "core/ngram_store_step.h"

namespace ngram_npu {

struct NgramStoreFinishParams {
  StoreAccess store;
  IndexArray slot_indices;  // [count], present
  int64_t count;
};

}  // namespace ngram_npu
