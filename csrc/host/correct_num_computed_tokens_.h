#pragma once

#include "core/correct_num_computed_tokens_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// The tensors of the correction, for the two operators that have them.
CorrectNumComputedTokensParams check_counts(Arguments& arguments, const TensorView& num_computed_tokens,
                                            const TensorView& num_accepted_tokens, const TensorView& prev_positions,
                                            const TensorView& num_sampled_prev, const TensorView& num_draft_prev,
                                            const TensorView& host_num_computed_tokens);

CorrectNumComputedTokensParams check_correct_num_computed_tokens_(
    const TensorView& num_computed_tokens, const TensorView& num_accepted_tokens, const TensorView& prev_positions,
    const TensorView& num_sampled_prev, const TensorView& num_draft_prev, const TensorView& host_num_computed_tokens);

}  // namespace ngram_npu::host
