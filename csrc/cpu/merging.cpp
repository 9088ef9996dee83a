// CPU kernel of merge_drafts_.
#include "core/merging.h"

using namespace ngram_npu;

namespace {

constexpr AcceptanceProbabilities kAcceptanceProbabilities;

template <class Token>
void merge_all_drafts(const MergeDraftsParams& p) {
  for (int64_t i = 0; i < p.batch; ++i) merge_drafts<Token>(p, kAcceptanceProbabilities, i);
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_merge_drafts_(const MergeDraftsParams* params, void*) {
  params->token_bytes == 8 ? merge_all_drafts<int64_t>(*params) : merge_all_drafts<int32_t>(*params);
  return kOk;
}
