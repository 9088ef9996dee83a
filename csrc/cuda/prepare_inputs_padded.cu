#include "core/prepare_inputs_padded.h"
#include "cuda/launch.cuh"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void* stream) {
  return cuda::launch_items(*params, params->batch, stream);
}
