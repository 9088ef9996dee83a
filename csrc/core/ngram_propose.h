// ngram_propose, and ngram_propose_ into the caller's tensors: drafts for each row by looking its last tokens up in the
// row itself. Contract: docs/ops/ngram_propose.md.
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu {

struct NgramProposeParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  IndexArray row_indices;              // [B]
  Gm<const int32_t> num_sampled;       // [B]: only requests above 0 draft; or null: all draft
  int64_t batch;
  LookupOptions lookup;
  DraftRows draft_token_ids;     // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  DraftCosts draft_costs;        // [B, k]
  Gm<void> workspace;            // device backends only
  const Executor* executor;      // host backends only; null: the calling thread
};

NGRAM_FN LiveRow live_row(const NgramProposeParams& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row) || (p.num_sampled != nullptr && p.num_sampled[i] <= 0)) return {-1, 0};
  return {row, p.num_tokens[row]};
}

// The token for places of request i that nothing is read for: with `fill` the row's last, also if num_sampled is 0.
NGRAM_FN int32_t unused_token(const NgramProposeParams& p, int64_t i) {
  if (!p.lookup.fill) return kNoToken;
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return kNoToken;
  const int64_t length = p.num_tokens[row];
  return length >= 1 && length <= p.token_ids.capacity ? p.token_ids[row][length - 1] : kNoToken;
}

}  // namespace ngram_npu
