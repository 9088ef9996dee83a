// The correction of the counts, for correct_num_computed_tokens_ and correct_spec_state_.
#pragma once

#include "core/correct_num_computed_tokens.h"

namespace ngram_npu::cpu {

// Returns kOk, or kOutOfMemory with nothing written.
int32_t correct_counts(const CorrectNumComputedTokensParams& p);

}  // namespace ngram_npu::cpu
