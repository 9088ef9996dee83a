#include "core/ngram_step.h"

#include <cstring>

#include "cpu/lookup.h"
#include "cpu/parallel.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const NgramStepParams* params, void*) {
  const NgramStepParams& p = *params;
  const cpu::FindOccurrence find = cpu::find_occurrence();
  const int64_t tokens = cpu::tokens_to_read(p.token_ids, p.num_tokens, p.row_indices, p.batch);
  cpu::for_each_row(p.executor, p.batch, tokens, [&](int64_t i) {
    const Accepted a = accept(p, i);
    p.next_token_ids[i] = a.next_token;
    p.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
    int32_t* row = a.row >= 0 ? p.token_ids[a.row] : nullptr;
    const int64_t length = a.old_length + a.num_appended;
    if (a.num_appended > 0) {
      std::memcpy(row + a.old_length, p.sampled_token_ids[i], static_cast<size_t>(a.num_appended) * sizeof(int32_t));
      if (p.advance) p.num_tokens[a.row] = static_cast<int32_t>(length);
    }
    cpu::draft_row(find, row, drafts(a) ? length : 0, p.token_ids.capacity, p.lookup, unused_token(p, i),
                   p.draft_token_ids + i * p.lookup.k, p.num_draft_tokens + i, p.match_len + i);
  });
  return kOk;
}
