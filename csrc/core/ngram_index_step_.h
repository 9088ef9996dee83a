// ngram_index_step_: ngram_step_, answered from an index. Contract: docs/ops/ngram_index_step_.md; what the index
// tensor contains: core/ngram_index_layout.h; why its answers are exact: docs/design/index.md.
#pragma once

#include "core/ngram_step_.h"

namespace ngram_npu {

// About a millisecond of building.
constexpr int64_t kNgramIndexCatchUpTokens = 32768;

struct NgramIndexStepParams {
  NgramStepParams step;  // the arguments of ngram_step_; executor unused: one thread is fastest here
  int32_t* index;        // see ngram_npu_cpu_ngram_index_words
  int64_t index_words;
  IndexArray slot_indices;  // [B]; absent: the slot of a row is the row
  // How many tokens one call may index, over all rows, beyond those it appended itself (a prompt that was not appended,
  // a rebuilt slot). A row that is not caught up within it is scanned, and goes on in the next step: no step stalls.
  // Negative: no limit.
  int64_t catch_up_tokens;
};

}  // namespace ngram_npu
