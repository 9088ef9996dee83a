// ngram_step_: append the sampled tokens to their rows, then draft from the grown rows. Contract:
// docs/ops/ngram_step.md.
#pragma once

#include "core/lookup_rules.h"
#include "core/prepare_next_token_ids.h"

namespace ngram_npu {

struct NgramStepParams {
  TokenRows<int32_t> token_ids;                // [R, S], written
  Gm<int32_t> num_tokens;                      // [R], written if advance
  TokenRows<const int32_t> sampled_token_ids;  // [B, M]
  Gm<const uint8_t> discard;                   // [B], or null: none; bool bytes, any nonzero is true
  IndexArray row_indices;                      // [B]
  int64_t batch;
  bool advance;
  int64_t vocab_size;
  LookupOptions lookup;
  Gm<int32_t> next_token_ids;    // [B]
  Gm<int32_t> num_sampled;       // [B]
  DraftRows draft_token_ids;     // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  DraftCosts draft_costs;        // [B, k]
  Gm<void> workspace;            // device backends only
  const Executor* executor;      // host backends only; null: the calling thread
};

// The number of `count` new tokens that fit into a row.
NGRAM_FN int64_t appended(int64_t count, int64_t num_tokens, int64_t capacity) {
  return smaller(count, capacity - num_tokens);
}

// The result of accepting the sampled tokens of one request.
struct Accepted {
  int64_t row;          // -1: no usable row, nothing to write or look up
  int64_t old_length;   // of that row, before the append
  int64_t num_sampled;  // valid entries, before the capacity clamp
  int64_t num_appended;
  int32_t next_token;
};

// The row that a request appends to, if it has a usable one.
NGRAM_FN LiveRow live_row(const NgramStepParams& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return {-1, 0};
  const int64_t length = p.num_tokens[row];
  if (length < 0 || length > p.token_ids.capacity) return {-1, 0};
  return {row, length};
}

NGRAM_FN bool discarded(const NgramStepParams& p, int64_t i) { return p.discard != nullptr && p.discard[i] != 0; }

NGRAM_FN int64_t sampled_run(const NgramStepParams& p, int64_t i) {
  if (discarded(p, i)) return 0;
  return leading_run(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.vocab_size);
}

NGRAM_FN int32_t next_token(const NgramStepParams& p, int64_t i, const LiveRow& live, int64_t num_sampled) {
  if (live.row < 0) return 0;
  if (num_sampled > 0) return p.sampled_token_ids[i][num_sampled - 1];
  return live.length > 0 ? p.token_ids[live.row][live.length - 1] : 0;
}

// Does not write, so that in a device kernel every thread can decide and one thread writes.
NGRAM_FN Accepted accept(const NgramStepParams& p, int64_t i, const LiveRow& live, int64_t num_sampled) {
  const int64_t taken = live.row >= 0 ? appended(num_sampled, live.length, p.token_ids.capacity) : 0;
  return {live.row, live.length, num_sampled, taken, next_token(p, i, live, num_sampled)};
}
NGRAM_FN Accepted accept(const NgramStepParams& p, int64_t i) {
  return accept(p, i, live_row(p, i), sampled_run(p, i));
}

// Only requests with a sampled token draft: the drafts of the others would not be verified in the next step.
NGRAM_FN bool drafts(const Accepted& a) { return a.row >= 0 && a.num_sampled > 0; }

// The token for places that nothing is read for: with `fill` the request's newest.
NGRAM_FN int32_t unused_token(const NgramStepParams& p, const Accepted& a) {
  const bool has_token = a.row >= 0 && (a.num_sampled > 0 || a.old_length > 0);
  return p.lookup.fill && has_token ? a.next_token : kNoToken;
}

}  // namespace ngram_npu
