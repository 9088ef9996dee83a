#include "core/prepare_inputs_padded.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void*) {
  const PrepareInputsPaddedParams& p = *params;
  for (int64_t i = 0; i < p.batch; ++i) {
    const int32_t rejected = rejected_of(p, i);
    p.num_rejected[i] = rejected;
    p.token_indices_to_sample[i] = index_to_sample(p, i, rejected);
  }
  return kOk;
}
