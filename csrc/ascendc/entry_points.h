// Which plan serves which operator: NGRAM_NPU_ASCENDC_OPS(X) calls X(op, Params) for each that has a kernel. A launcher
// makes the C entry points `ngram_npu_ascendc_<op>` of it.
#pragma once

#include "ascendc/prepare_inputs_padded_tiling.h"

#define NGRAM_NPU_ASCENDC_OPS(X) X(prepare_inputs_padded, PrepareInputsPaddedParams)
