#include "core/prepare_input_ids.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_input_ids_(const PrepareInputIdsParams* params, void*) {
  const PrepareInputIdsParams& p = *params;
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t prev = p.prev_positions[i];
    if (!p.draft_token_ids.has(prev)) continue;
    const InputSpan span = input_span(p, i);
    for (int64_t n = span.begin; n < span.end; ++n) p.input_ids[n] = input_id(p, span, prev, n);
  }
  return kOk;
}
