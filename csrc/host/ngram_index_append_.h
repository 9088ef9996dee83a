#pragma once

#include "core/ngram_index_append_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, the executor still to be filled in by the front end.
NgramIndexAppendParams check_ngram_index_append_(const TensorView& token_ids, const TensorView& num_tokens,
                                                 const TensorView* row_indices, const TensorView& index,
                                                 const TensorView* slot_indices, int64_t min_n, int64_t max_n,
                                                 int64_t match_policy);

}  // namespace ngram_npu::host
