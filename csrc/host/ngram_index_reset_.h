#pragma once

#include "core/ngram_index_reset_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

NgramIndexResetParams check_ngram_index_reset_(const TensorView& index, const TensorView& slot_indices);

}  // namespace ngram_npu::host
