#include "core/ngram_propose.h"

#include "cpu/lookup.h"
#include "cpu/parallel.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const NgramProposeParams* params, void*) {
  const NgramProposeParams& p = *params;
  const cpu::FindOccurrence find = cpu::find_occurrence();
  const int64_t tokens = cpu::tokens_to_read(p.token_ids, p.num_tokens, p.row_indices, p.batch);
  cpu::for_each_row(p.executor, p.batch, tokens, [&](int64_t i) {
    const LiveRow live = live_row(p, i);
    cpu::draft_row(find, live.row >= 0 ? p.token_ids[live.row] : nullptr, live.length, p.token_ids.capacity, p.lookup,
                   unused_token(p, i), p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i, p.match_len + i);
  });
  return kOk;
}
