// prepare_input_ids_: copy the last step's tokens to this step's input. Contract: docs/ops/prepare_input_ids.md.
#pragma once

#include "core/batch.h"

namespace ngram_npu {

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

// The input positions of a request's newest token and drafts; begin >= end if there are none.
struct InputSpan {
  int64_t begin;
  int64_t end;
  int64_t first_draft;  // position of draft 0; the newest token is right before it
};

// Here and below `Inputs` is the parameters or a kernel's copies of their arrays under the same names.
template <class Inputs>
NGRAM_FN InputSpan input_span(const Inputs& p, int64_t i) {
  const TokenRange own = tokens_of(p.query_start_loc, i, p.num_inputs);
  const int64_t first_draft = int64_t{p.query_start_loc[i + 1]} - p.num_scheduled_drafts[i];
  return {larger(own.begin, first_draft - 1), own.end, first_draft};
}

// The token for input position n of the span, for a request that was at position `prev`.
template <class Inputs>
NGRAM_FN int32_t input_id(const Inputs& p, const InputSpan& span, int64_t prev, int64_t n) {
  if (n < span.first_draft) return p.next_token_ids[prev];
  const int64_t j = n - span.first_draft;
  const int32_t draft = j < p.draft_token_ids.capacity ? p.draft_token_ids[prev][j] : kNoToken;
  return draft < 0 ? p.pad_token : draft;
}

// What request i writes, by `lanes` threads that each call this with a number below that.
NGRAM_FN void write_item(const PrepareInputIdsParams& p, int64_t i, int64_t lane, int64_t lanes) {
  const int64_t prev = p.prev_positions[i];
  if (!p.draft_token_ids.has(prev)) return;
  const InputSpan span = input_span(p, i);
  for (int64_t n = span.begin + lane; n < span.end; n += lanes) p.input_ids[n] = input_id(p, span, prev, n);
}

}  // namespace ngram_npu
