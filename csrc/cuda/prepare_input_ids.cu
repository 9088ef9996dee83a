#include "core/prepare_input_ids.h"
#include "cuda/launch.cuh"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_input_ids_(const PrepareInputIdsParams* params, void* stream) {
  return cuda::launch_items<cuda::kWarpSize>(*params, params->batch, stream);
}
