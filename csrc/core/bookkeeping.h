// Parameters and per-request functions of the operators that process sampled tokens and prepare the drafter's batch.
// ngram_step_ uses the same functions for its sampled tokens. The types Batch and Inputs are either the Params struct
// or a kernel's struct of staged copies with the same member names.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// prepare_next_token_ids: each request's newest token. Contract: docs/ops/prepare_next_token_ids.md.

// Number of valid tokens before the first invalid token. A rejection sampler writes -1 for rejected tokens.
template <class Tokens>
NGRAM_FN int64_t count_valid_prefix(const Tokens& sampled_tokens, int64_t width, int64_t vocab_size) {
  int64_t n = 0;
  while (n < width && is_valid_token(sampled_tokens[n], vocab_size)) ++n;
  return n;
}

struct PrepareNextTokenIdsParams {
  TokenRows<const int32_t> sampled_token_ids;  // [B, M]
  Gm<const uint8_t> discard;                   // [B] bool bytes, any nonzero is true; null: nothing is discarded
  Gm<const int32_t> backup_token_ids;          // [B]; null: the last tokens of the rows are used
  TokenRows<const int32_t> token_ids;          // [R, S]
  Gm<const int32_t> num_tokens;                // [R]
  IndexArray row_indices;                      // [B]
  int64_t batch;
  int64_t vocab_size;
  Gm<int32_t> next_token_ids;  // [B]
  Gm<int32_t> num_sampled;     // [B]
};

// The next token of request i if it has no valid sampled token.
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

// The next token of request i. `sampled_tokens` are the request's tokens in the tensor, or a kernel's copy of them.
template <class Tokens>
NGRAM_FN NextToken next_token(const PrepareNextTokenIdsParams& p, int64_t i, const Tokens& sampled_tokens,
                              bool discarded) {
  const int64_t count = discarded ? 0 : count_valid_prefix(sampled_tokens, p.sampled_token_ids.capacity, p.vocab_size);
  return {count > 0 ? sampled_tokens[count - 1] : backup_token(p, i), static_cast<int32_t>(count)};
}
NGRAM_FN NextToken next_token(const PrepareNextTokenIdsParams& p, int64_t i) {
  return next_token(p, i, p.sampled_token_ids[i], p.discard != nullptr && p.discard[i]);
}

// Writes the outputs of request i. The other overloads of write_item() do the same for their operators.
NGRAM_FN void write_item(const PrepareNextTokenIdsParams& p, int64_t i) {
  const NextToken next = next_token(p, i);
  p.next_token_ids[i] = next.token;
  p.num_sampled[i] = next.num_sampled;
}

// prepare_inputs_padded: the row of logits that each request samples from. Contract: docs/ops/prepare_inputs_padded.md.
struct PrepareInputsPaddedParams {
  Gm<const int32_t> cu_num_draft_tokens;  // [B], inclusive cumulative sums
  Gm<const int32_t> num_sampled;          // [B]
  Gm<const int32_t> query_start_loc;      // [B + 1]
  int64_t batch;
  Gm<int32_t> token_indices_to_sample;  // [B]
  Gm<int32_t> num_rejected;             // [B]
};

// Returns the number of rejected draft tokens of request i. A request samples one token per accepted draft token and
// one more token. The result is at least 0, because with a negative number the index to sample from would lie beyond
// the request's last token.
template <class Batch>
NGRAM_FN int32_t count_rejected_drafts(const Batch& p, int64_t i) {
  const int32_t earlier_drafts = i > 0 ? p.cu_num_draft_tokens[i - 1] : 0;
  const int32_t num_drafts = wrap_sub(p.cu_num_draft_tokens[i], earlier_drafts);
  const int32_t num_rejected = wrap_sub(wrap_add(num_drafts, 1), p.num_sampled[i]);
  return num_drafts > 0 && num_rejected > 0 ? num_rejected : 0;
}

template <class Batch>
NGRAM_FN int32_t index_to_sample(const Batch& p, int64_t i, int32_t num_rejected) {
  return wrap_sub(wrap_sub(p.query_start_loc[i + 1], 1), num_rejected);
}

NGRAM_FN void write_item(const PrepareInputsPaddedParams& p, int64_t i) {
  const int32_t num_rejected = count_rejected_drafts(p, i);
  p.num_rejected[i] = num_rejected;
  p.token_indices_to_sample[i] = index_to_sample(p, i, num_rejected);
}

// prepare_inputs: removes the rejected tokens from the flat batch. Contract: docs/ops/prepare_inputs.md.
struct PrepareInputsParams {
  Gm<const int32_t> query_start_loc;  // [B + 1]
  Gm<const int32_t> seq_lens;         // [B]
  Gm<const int32_t> num_rejected;     // [B]
  int64_t batch;
  int64_t total_tokens;
  Gm<int32_t> query_start_loc_out;  // [B + 1]
  Gm<int32_t> seq_lens_out;         // [B]
  Gm<int32_t> token_indices;        // [total_tokens]
};

// Number of a request's tokens that stay in the batch, and number of its rejected tokens.
struct KeptTokenCounts {
  int32_t num_kept;
  int32_t num_rejected;
};

template <class Batch>
NGRAM_FN KeptTokenCounts count_kept_tokens(const Batch& p, int64_t i) {
  const int32_t num_scheduled = larger(num_scheduled_tokens(p.query_start_loc, i), 0);
  const int32_t num_rejected = smaller(larger(p.num_rejected[i], 0), num_scheduled);
  return {num_scheduled - num_rejected, num_rejected};
}

// prepare_input_ids_: copies the last step's tokens to this step's input. Contract: docs/ops/prepare_input_ids.md.
struct PrepareInputIdsParams {
  Gm<int32_t> input_ids;  // [num_inputs], written
  int64_t num_inputs;
  Gm<const int32_t> query_start_loc;         // [B + 1]
  IndexArray prev_positions;                 // [B]
  Gm<const int32_t> next_token_ids;          // [Q]
  TokenRows<const int32_t> draft_token_ids;  // [Q, K]
  Gm<const int32_t> num_scheduled_drafts;    // [B]
  int64_t batch;
  int32_t pad_token;
};

// The input positions of a request's newest token and drafts; begin >= end if the request has no input.
struct InputSpan {
  int64_t begin;
  int64_t end;
  int64_t first_draft;  // position of draft token 0; the newest token is at the position before
};

template <class Inputs>
NGRAM_FN InputSpan input_span(const Inputs& p, int64_t i) {
  const TokenRange request_tokens = request_token_range(p.query_start_loc, i, p.num_inputs);
  const int64_t first_draft = int64_t{p.query_start_loc[i + 1]} - p.num_scheduled_drafts[i];
  return {larger(request_tokens.begin, first_draft - 1), request_tokens.end, first_draft};
}

// The token for input position n of the span. `prev_position` is the request's batch position in the previous step.
template <class Inputs>
NGRAM_FN int32_t input_id(const Inputs& p, const InputSpan& span, int64_t prev_position, int64_t n) {
  if (n < span.first_draft) return p.next_token_ids[prev_position];
  const int64_t j = n - span.first_draft;
  const int32_t draft = j < p.draft_token_ids.capacity ? p.draft_token_ids[prev_position][j] : kNoToken;
  return draft < 0 ? p.pad_token : draft;
}

// Writes the input ids of request i. num_lanes threads call this function, each with a different `lane` in
// [0, num_lanes).
NGRAM_FN void write_item(const PrepareInputIdsParams& p, int64_t i, int64_t lane, int64_t num_lanes) {
  const int64_t prev_position = p.prev_positions[i];
  if (!p.draft_token_ids.has(prev_position)) return;
  const InputSpan span = input_span(p, i);
  for (int64_t n = span.begin + lane; n < span.end; n += num_lanes)
    p.input_ids[n] = input_id(p, span, prev_position, n);
}

}  // namespace ngram_npu
