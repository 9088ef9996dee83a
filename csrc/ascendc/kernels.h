// The kernels by name. Each is `extern "C" __global__ __aicore__ void <name>(NgramNpuLaunchArgs)`.
#pragma once

#define NGRAM_NPU_ASCENDC_KERNELS(X) \
  X(ngram_npu_ngram_propose_search)  \
  X(ngram_npu_ngram_propose_draft)   \
  X(ngram_npu_ngram_step_search)     \
  X(ngram_npu_ngram_step_draft)      \
  X(ngram_npu_prepare_inputs_padded)
