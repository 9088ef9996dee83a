#include "core/ngram_propose.h"

#include "ascendc/lookup.h"

namespace ngram_npu::ascendc {

template <>
__aicore__ inline GrownRow grown_row(const NgramProposeParams& p, int64_t i) {
  const LiveRow live = live_row(p, i);
  if (!may_draft(live.length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[live.row], live.length, nullptr, live.length};
}

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_search(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  search_items<NgramProposeParams>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_draft(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<NgramProposeParams>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  const Shares& share = tiling.requests;
  AscendC::TPipe pipe;
  Drafter drafter(pipe, tiling, p.lookup);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    drafter.load(args.workspace, first, count);
    for (int64_t j = 0; j < count; ++j) drafter.draft(j, grown_row(p, first + j), unused_token(p, first + j));
    order<AscendC::HardEvent::S_MTE3>();
    drafter.store(p, first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}
