// Which plan serves which operator: NGRAM_NPU_ASCENDC_OPS(X) calls X(op, Params) for each that has a kernel. A launcher
// makes the C entry points `ngram_npu_ascendc_<op>` of it.
#pragma once

#include "ascendc/compute_slot_mapping__tiling.h"
#include "ascendc/correct_num_computed_tokens__tiling.h"
#include "ascendc/correct_spec_state__tiling.h"
#include "ascendc/ngram_propose_tiling.h"
#include "ascendc/ngram_step__tiling.h"
#include "ascendc/prepare_input_ids__tiling.h"
#include "ascendc/prepare_inputs_padded_tiling.h"
#include "ascendc/prepare_inputs_tiling.h"
#include "ascendc/prepare_next_token_ids_tiling.h"

#define NGRAM_NPU_ASCENDC_OPS(X)                                  \
  X(compute_slot_mapping_, ComputeSlotMappingParams)              \
  X(correct_num_computed_tokens_, CorrectNumComputedTokensParams) \
  X(correct_spec_state_, CorrectSpecStateParams)                  \
  X(ngram_propose, NgramProposeParams)                            \
  X(ngram_step_, NgramStepParams)                                 \
  X(prepare_input_ids_, PrepareInputIdsParams)                    \
  X(prepare_inputs, PrepareInputsParams)                          \
  X(prepare_inputs_padded, PrepareInputsPaddedParams)             \
  X(prepare_next_token_ids, PrepareNextTokenIdsParams)
