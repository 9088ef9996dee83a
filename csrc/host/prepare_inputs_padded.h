#pragma once

#include "core/prepare_inputs_padded.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, outputs still to be filled in by the front end.
PrepareInputsPaddedParams check_prepare_inputs_padded(const TensorView& cu_num_draft_tokens,
                                                      const TensorView& num_sampled, const TensorView& query_start_loc);

}  // namespace ngram_npu::host
