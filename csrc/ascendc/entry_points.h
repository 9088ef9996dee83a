// Which plan serves which operator: NGRAM_NPU_ASCENDC_OPS(X) calls X(op, Params) for each that has a kernel. A launcher
// makes the C entry points `ngram_npu_ascendc_<op>` of it.
#pragma once

#include "ascendc/ngram_propose_tiling.h"
#include "ascendc/ngram_step__tiling.h"
#include "ascendc/prepare_inputs_padded_tiling.h"

#define NGRAM_NPU_ASCENDC_OPS(X)       \
  X(ngram_propose, NgramProposeParams) \
  X(ngram_step_, NgramStepParams)      \
  X(prepare_inputs_padded, PrepareInputsPaddedParams)
