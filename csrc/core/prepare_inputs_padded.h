// prepare_inputs_padded: the row of logits that each request samples from. Contract: docs/ops/prepare_inputs_padded.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

struct PrepareInputsPaddedParams {
  Gm<const int32_t> cu_num_draft_tokens;  // [B], inclusive
  Gm<const int32_t> num_sampled;          // [B]
  Gm<const int32_t> query_start_loc;      // [B + 1]
  int64_t batch;
  Gm<int32_t> token_indices_to_sample;  // [B]
  Gm<int32_t> num_rejected;             // [B]
};

// A request samples one token per accepted draft and one more. Never below 0: the token to sample from would lie after
// the request's tokens.
NGRAM_FN int32_t rejected_drafts(int32_t num_drafts, int32_t num_sampled) {
  const int32_t rejected = wrap_sub(wrap_add(num_drafts, 1), num_sampled);
  return num_drafts > 0 && rejected > 0 ? rejected : 0;
}

// Here and below `Batch` is the parameters or a kernel's copies of their arrays under the same names.
template <class Batch>
NGRAM_FN int32_t rejected_of(const Batch& p, int64_t i) {
  const int32_t before = i > 0 ? p.cu_num_draft_tokens[i - 1] : 0;
  return rejected_drafts(wrap_sub(p.cu_num_draft_tokens[i], before), p.num_sampled[i]);
}

template <class Batch>
NGRAM_FN int32_t index_to_sample(const Batch& p, int64_t i, int32_t rejected) {
  return wrap_sub(wrap_sub(p.query_start_loc[i + 1], 1), rejected);
}

NGRAM_FN void write_item(const PrepareInputsPaddedParams& p, int64_t i) {
  const int32_t rejected = rejected_of(p, i);
  p.num_rejected[i] = rejected;
  p.token_indices_to_sample[i] = index_to_sample(p, i, rejected);
}

}  // namespace ngram_npu
