#pragma once

#include "core/prepare_next_token_ids.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// Checked parameters, outputs still to be filled in by the front end.
PrepareNextTokenIdsParams check_prepare_next_token_ids(const TensorView& sampled_token_ids, const TensorView* discard,
                                                       const TensorView* backup_token_ids, const TensorView* token_ids,
                                                       const TensorView* num_tokens, const TensorView* row_indices,
                                                       int64_t vocab_size);

}  // namespace ngram_npu::host
