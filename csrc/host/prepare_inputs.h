#pragma once

#include "core/prepare_inputs.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, outputs still to be filled in by the front end.
PrepareInputsParams check_prepare_inputs(const TensorView& query_start_loc, const TensorView& seq_lens,
                                         const TensorView& num_rejected, int64_t total_tokens);

}  // namespace ngram_npu::host
