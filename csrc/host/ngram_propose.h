#pragma once

#include "core/ngram_propose.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, outputs and executor still to be filled in by the front end.
NgramProposeParams check_ngram_propose(const TensorView& token_ids, const TensorView& num_tokens,
                                       const TensorView* row_indices, const TensorView* active, int64_t min_n,
                                       int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len);

}  // namespace ngram_npu::host
