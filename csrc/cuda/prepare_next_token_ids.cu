#include "core/prepare_next_token_ids.h"
#include "cuda/launch.cuh"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void* stream) {
  return cuda::launch_items(*params, params->batch, stream);
}
