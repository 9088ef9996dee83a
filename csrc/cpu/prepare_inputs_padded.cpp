#include "core/prepare_inputs_padded.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) write_item(*params, i);
  return kOk;
}
