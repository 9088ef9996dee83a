// ngram_index_append_: index the tokens that rows hold, prompts in one piece or in several. Contract:
// docs/ops/ngram_index_append_.md.
#pragma once

#include "core/lookup.h"

namespace ngram_npu {

struct NgramIndexAppendParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  const int32_t* num_tokens;           // [R]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot of a row is the row
  int64_t batch;
  int64_t min_n;
  int64_t max_n;
  int32_t match;
  int32_t* index;
  int64_t index_words;
  const Executor* executor;  // null: the calling thread
};

}  // namespace ngram_npu
