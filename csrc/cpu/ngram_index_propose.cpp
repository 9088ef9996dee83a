#include "core/ngram_index_propose.h"

#include "cpu/ngram_index_drafter.h"

using namespace ngram_npu;

namespace {

cpu::GrownRow as_it_stands(const NgramProposeParams& p, int64_t i) {
  const LiveRow live = live_row(p, i);
  return {live.row, live.length, live.length, larger<int64_t>(live.length - kMaxSampledWidth, 0), live.row >= 0};
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_propose_(const NgramIndexProposeParams* params, void*) {
  cpu::IndexDrafter<NgramProposeParams, as_it_stands>(params->propose, params->index, params->catch_up_tokens,
                                                      params->ladder)
      .run();
  return kOk;
}
