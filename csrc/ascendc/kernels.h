// The kernels by name. Each is `extern "C" __global__ __aicore__ void <name>(NgramNpuLaunchArgs)`.
#pragma once

#define NGRAM_NPU_ASCENDC_KERNELS(X)       \
  X(ngram_npu_compute_slot_mapping)        \
  X(ngram_npu_correct_num_computed_tokens) \
  X(ngram_npu_correct_spec_state)          \
  X(ngram_npu_ngram_propose)               \
  X(ngram_npu_ngram_propose_draft)         \
  X(ngram_npu_ngram_propose_search)        \
  X(ngram_npu_ngram_step)                  \
  X(ngram_npu_ngram_step_draft)            \
  X(ngram_npu_ngram_step_search)           \
  X(ngram_npu_place_num_computed_tokens)   \
  X(ngram_npu_prepare_input_ids)           \
  X(ngram_npu_prepare_inputs)              \
  X(ngram_npu_prepare_inputs_padded)       \
  X(ngram_npu_prepare_next_token_ids)
