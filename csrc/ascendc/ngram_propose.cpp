#include "core/ngram_propose.h"

#include "ascendc/lookup.h"

namespace ngram_npu::ascendc {

template <>
__aicore__ inline GrownRow grown_row(const NgramProposeParams& p, int64_t i) {
  const LiveRow live = live_row(p, i);
  if (!may_draft(live.length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[live.row], live.length, nullptr, live.length};
}

class ProposeResults {
 public:
  __aicore__ inline ProposeResults(AscendC::TPipe& pipe, int64_t per_pass, const NgramProposeParams& p)
      : drafter_(pipe, per_pass, p) {}

  __aicore__ inline void prepare(const NgramProposeParams& p, int64_t i, int64_t j) {
    rows_[j] = grown_row(p, i);
    unused_[j] = unused_token(p, i);
  }
  template <class Best>
  __aicore__ inline void add(const NgramProposeParams&, int64_t, int64_t j, const Best& best) {
    drafter_.draft(j, rows_[j], best, unused_[j]);
  }
  __aicore__ inline void store(const NgramProposeParams& p, int64_t first, int64_t count) {
    order<AscendC::HardEvent::S_MTE3>();
    drafter_.store(p, first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }

 private:
  Drafter drafter_;
  GrownRow rows_[kMaxDrafting];
  int32_t unused_[kMaxDrafting];
};

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_and_draft<ngram_npu::NgramProposeParams, ngram_npu::ascendc::ProposeResults>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_search(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_into_workspace<ngram_npu::NgramProposeParams>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_draft(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::draft_from_workspace<ngram_npu::NgramProposeParams, ngram_npu::ascendc::ProposeResults>(args);
}
