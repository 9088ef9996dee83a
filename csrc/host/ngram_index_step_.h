#pragma once

#include "core/ngram_index_step_.h"
#include "host/ngram_step_.h"

namespace ngram_npu::host {

// Checked parameters, outputs still to be filled in by the front end.
NgramIndexStepParams check_ngram_index_step_(const StepArguments& given, const TensorView& index,
                                             const TensorView* slot_indices, const TensorView* workspace);

}  // namespace ngram_npu::host
