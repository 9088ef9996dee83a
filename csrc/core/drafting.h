// Parameters of the drafting operators, and per-request functions of ngram_propose and ngram_step_.
#pragma once

#include "core/bookkeeping.h"
#include "core/lookup_rules.h"

namespace ngram_npu {

// ngram_propose and ngram_propose_ draft for each row by looking up the row's last tokens in the row itself.
// ngram_propose_ writes to the caller's tensors. Contract: docs/ops/ngram_propose.md.
struct NgramProposeParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  IndexArray row_indices;              // [B]
  Gm<const int32_t> num_sampled;       // [B]: requests with 0 or fewer get no draft; null: all requests draft
  int64_t batch;
  LookupOptions lookup;
  DraftRows draft_token_ids;     // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  Gm<void> workspace;            // device backends only
  const Executor* executor;      // host backends only; null: the calling thread
};

// The row of a request, even if the request gets no draft. The length may be invalid.
NGRAM_FN RequestRow assigned_row(const NgramProposeParams& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return {-1, 0};
  return {row, p.num_tokens[row]};
}
// A request gets a draft only if this number is positive.
NGRAM_FN int32_t num_new_tokens(const NgramProposeParams& p, int64_t i) {
  return p.num_sampled != nullptr ? p.num_sampled[i] : 1;
}
NGRAM_FN RequestRow request_row(const NgramProposeParams& p, int64_t i) {
  if (num_new_tokens(p, i) <= 0) return {-1, 0};
  return assigned_row(p, i);
}

// The token for output positions that are not filled from the row, even if num_sampled is 0; kNoToken without a valid
// row.
NGRAM_FN int32_t padding_token(const NgramProposeParams& p, const RequestRow& assigned) {
  const bool has_token = assigned.length >= 1 && assigned.length <= p.token_ids.capacity;
  if (!p.lookup.fill || !has_token) return kNoToken;
  return padding_after(p.token_ids[assigned.row][assigned.length - 1], p.lookup.vocab_size);
}
NGRAM_FN int32_t padding_token(const NgramProposeParams& p, int64_t i) { return padding_token(p, assigned_row(p, i)); }

// ngram_step_: appends the sampled tokens to their rows, then drafts from the updated rows. Contract:
// docs/ops/ngram_step.md.
struct NgramStepParams {
  TokenRows<int32_t> token_ids;                // [R, S], written
  Gm<int32_t> num_tokens;                      // [R], written if advance
  TokenRows<const int32_t> sampled_token_ids;  // [B, M]
  Gm<const uint8_t> discard;                   // [B] bool bytes, any nonzero is true; null: nothing is discarded
  IndexArray row_indices;                      // [B]
  int64_t batch;
  bool advance;
  LookupOptions lookup;          // its vocab_size also limits the sampled tokens
  Gm<int32_t> next_token_ids;    // [B]
  Gm<int32_t> num_sampled;       // [B]
  DraftRows draft_token_ids;     // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  Gm<void> workspace;            // device backends only
  const Executor* executor;      // host backends only; null: the calling thread
};

// How many of `count` new tokens fit into a row of `num_tokens` tokens.
NGRAM_FN int64_t num_appended_tokens(int64_t count, int64_t num_tokens, int64_t capacity) {
  return smaller(count, capacity - num_tokens);
}

// The result of accepting the sampled tokens of one request.
struct AcceptResult {
  int64_t row;          // -1: the request has no usable row, so nothing is appended or looked up
  int64_t old_length;   // the row's length before the append
  int64_t num_sampled;  // number of valid sampled tokens, even if not all of them fit into the row
  int64_t num_appended;
  int32_t next_token;
};

// The row that a request appends to.
NGRAM_FN RequestRow request_row(const NgramStepParams& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return {-1, 0};
  const int64_t length = p.num_tokens[row];
  if (length < 0 || length > p.token_ids.capacity) return {-1, 0};
  return {row, length};
}

NGRAM_FN bool is_discarded(const NgramStepParams& p, int64_t i) { return p.discard != nullptr && p.discard[i] != 0; }

NGRAM_FN int64_t count_sampled_tokens(const NgramStepParams& p, int64_t i) {
  if (is_discarded(p, i)) return 0;
  return count_valid_prefix(p.sampled_token_ids[i], p.sampled_token_ids.capacity, p.lookup.vocab_size);
}

NGRAM_FN int32_t next_token(const NgramStepParams& p, int64_t i, const RequestRow& row, int64_t num_sampled) {
  if (row.row < 0) return 0;
  if (num_sampled > 0) return p.sampled_token_ids[i][num_sampled - 1];
  return row.length > 0 ? p.token_ids[row.row][row.length - 1] : 0;
}

// Computes the result of accepting a request's sampled tokens but does not write it, so that in a device kernel every
// thread can compute the result and one thread writes it.
NGRAM_FN AcceptResult accept_tokens(const NgramStepParams& p, int64_t i, const RequestRow& row, int64_t num_sampled) {
  const int64_t num_appended = row.row >= 0 ? num_appended_tokens(num_sampled, row.length, p.token_ids.capacity) : 0;
  return {row.row, row.length, num_sampled, num_appended, next_token(p, i, row, num_sampled)};
}
NGRAM_FN AcceptResult accept_tokens(const NgramStepParams& p, int64_t i) {
  return accept_tokens(p, i, request_row(p, i), count_sampled_tokens(p, i));
}

// Only requests with a sampled token get drafts, because other drafts would not be verified in the next step.
NGRAM_FN bool should_draft(const AcceptResult& result) { return result.row >= 0 && result.num_sampled > 0; }

// The token for output positions that are not filled from the row; kNoToken without a newest token.
NGRAM_FN int32_t padding_token(const NgramStepParams& p, const AcceptResult& result) {
  const bool has_token = result.row >= 0 && (result.num_sampled > 0 || result.old_length > 0);
  return p.lookup.fill && has_token ? padding_after(result.next_token, p.lookup.vocab_size) : kNoToken;
}

}  // namespace ngram_npu
