// ngram_index_append_: index the tokens that rows hold, prompts whole or in pieces. Contract:
// docs/ops/ngram_index_append.md.
#pragma once

#include "core/ngram_index_layout.h"

namespace ngram_npu {

struct NgramIndexAppendParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  const int32_t* num_tokens;           // [R]
  IndexArray row_indices;              // [B]
  int64_t batch;
  int64_t min_n;
  int64_t max_n;
  int32_t match_policy;
  bool ladder;    // n-grams of 1, 2, 4, 8, 16 tokens
  bool outcomes;  // for drafts by cost (core/ngram_ladder.h)
  IndexAccess index;
  const Executor* executor;  // null: the calling thread
};

}  // namespace ngram_npu
