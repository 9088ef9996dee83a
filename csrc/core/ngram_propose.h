// ngram_propose: drafts for each row by looking its last tokens up in the row itself. Contract:
// docs/ops/ngram_propose.md.
#pragma once

#include "core/lookup.h"

namespace ngram_npu {

struct NgramProposeParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  IndexArray row_indices;              // [B]
  Gm<const uint8_t> active;            // [B], or null: all; bool bytes, any nonzero is true
  int64_t batch;
  LookupOptions lookup;
  Gm<int32_t> draft_token_ids;   // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  const Executor* executor;      // host backends only; null: the calling thread
};

}  // namespace ngram_npu
