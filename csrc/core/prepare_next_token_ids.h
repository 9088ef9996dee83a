// prepare_next_token_ids: each request's newest token. Contract: docs/ops/prepare_next_token_ids.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

NGRAM_FN bool is_valid_token(int32_t token, int64_t vocab_size) { return token >= 0 && token < vocab_size; }

// The leading run of valid entries: a rejection sampler writes -1 for rejected tokens.
template <class Tokens>
NGRAM_FN int64_t leading_run(const Tokens& sampled, int64_t width, int64_t vocab_size) {
  int64_t n = 0;
  while (n < width && is_valid_token(sampled[n], vocab_size)) ++n;
  return n;
}

struct PrepareNextTokenIdsParams {
  TokenRows<const int32_t> sampled_token_ids;  // [B, M]
  Gm<const uint8_t> discard;                   // [B], or null: none; bool bytes, any nonzero is true
  Gm<const int32_t> backup_token_ids;          // [B], or null: the rows' last tokens
  TokenRows<const int32_t> token_ids;          // [R, S]
  Gm<const int32_t> num_tokens;                // [R]
  IndexArray row_indices;                      // [B]
  int64_t batch;
  int64_t vocab_size;
  Gm<int32_t> next_token_ids;  // [B]
  Gm<int32_t> num_sampled;     // [B]
};

NGRAM_FN int32_t backup_token(const PrepareNextTokenIdsParams& p, int64_t i) {
  if (p.backup_token_ids != nullptr) return p.backup_token_ids[i];
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return 0;
  const int64_t length = p.num_tokens[row];
  return length >= 1 && length <= p.token_ids.capacity ? p.token_ids[row][length - 1] : 0;
}

struct NextToken {
  int32_t token;
  int32_t num_sampled;
};

// From a request's sampled tokens, in the tensor or in a kernel's copy of it.
template <class Tokens>
NGRAM_FN NextToken next_token(const PrepareNextTokenIdsParams& p, int64_t i, const Tokens& sampled, bool discarded) {
  const int64_t run = discarded ? 0 : leading_run(sampled, p.sampled_token_ids.capacity, p.vocab_size);
  return {run > 0 ? sampled[run - 1] : backup_token(p, i), static_cast<int32_t>(run)};
}
NGRAM_FN NextToken next_token(const PrepareNextTokenIdsParams& p, int64_t i) {
  return next_token(p, i, p.sampled_token_ids[i], p.discard != nullptr && p.discard[i]);
}

NGRAM_FN void write_item(const PrepareNextTokenIdsParams& p, int64_t i) {
  const NextToken next = next_token(p, i);
  p.next_token_ids[i] = next.token;
  p.num_sampled[i] = next.num_sampled;
}

}  // namespace ngram_npu
