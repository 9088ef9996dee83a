#include "core/ngram_index_propose.h"

#include "cpu/propose_row.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_propose_(const NgramIndexProposeParams* params, void*) {
  const NgramIndexProposeParams& p = *params;
  cpu::ProposeDrafter(p.propose, p.index, p.catch_up_tokens, p.ladder, {}).run();
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_draft(const DraftParams* params) {
  const NgramIndexProposeParams& p = params->lookup;
  cpu::ProposeDrafter(p.propose, p.index, p.catch_up_tokens, p.ladder, params->store).run();
  return kOk;
}
