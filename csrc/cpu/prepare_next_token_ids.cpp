#include "core/prepare_next_token_ids.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) write_item(*params, i);
  return kOk;
}
