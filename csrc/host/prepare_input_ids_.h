#pragma once

#include "core/prepare_input_ids_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

PrepareInputIdsParams check_prepare_input_ids_(const TensorView& input_ids, const TensorView& query_start_loc,
                                               const TensorView& prev_positions, const TensorView& next_token_ids,
                                               const TensorView& draft_token_ids,
                                               const TensorView& num_scheduled_drafts, int64_t pad_token);

}  // namespace ngram_npu::host
