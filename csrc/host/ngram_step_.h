#pragma once

#include "core/ngram_step_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, outputs and executor still to be filled in by the front end.
NgramStepParams check_ngram_step_(const TensorView& token_ids, const TensorView& num_tokens,
                                  const TensorView& sampled_token_ids, const TensorView* discard,
                                  const TensorView* row_indices, bool advance, int64_t vocab_size, int64_t min_n,
                                  int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                                  const TensorView* workspace);

}  // namespace ngram_npu::host
