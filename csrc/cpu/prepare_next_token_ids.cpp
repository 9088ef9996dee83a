#include "core/prepare_next_token_ids.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void*) {
  const PrepareNextTokenIdsParams& p = *params;
  for (int64_t i = 0; i < p.batch; ++i) {
    const NextToken next = next_token(p, i);
    p.next_token_ids[i] = next.token;
    p.num_sampled[i] = next.num_sampled;
  }
  return kOk;
}
