#include "core/correct_num_computed_tokens.h"

#include "ascendc/counts.h"

namespace ngram_npu::ascendc {
namespace {

__aicore__ inline void correct_num_computed_tokens_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectNumComputedTokensParams>(args.params);
  const Shares share = read_as<BatchTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  PreviousCounts previous(pipe, p);
  CountCorrector corrector(pipe, p, share.per_pass);
  previous.load();
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    corrector.load(p, first, smaller(share.per_pass, p.batch - first));
    corrector.load_accepted(p);
    order<AscendC::HardEvent::MTE2_V>();
    corrector.correct(previous);
    order<AscendC::HardEvent::V_MTE3>();
    corrector.store(p, Gm<int32_t>(args.workspace));
    order<AscendC::HardEvent::MTE3_MTE2>();
  }
}

// The second launch copies the new counts into place. correct_spec_state_ uses it too: its parameters begin with these.
__aicore__ inline void place_num_computed_tokens_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectNumComputedTokensParams>(args.params);
  const Shares share = read_as<BatchTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  Local<int32_t> computed(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    computed.load(0, Gm<const int32_t>(args.workspace) + first, count);
    order<AscendC::HardEvent::MTE2_MTE3>();
    computed.store(0, p.num_computed_tokens + first, count);
    order<AscendC::HardEvent::MTE3_MTE2>();
  }
}

}  // namespace
}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_correct_num_computed_tokens(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::correct_num_computed_tokens_kernel(args);
}

extern "C" __global__ __aicore__ void ngram_npu_place_num_computed_tokens(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::place_num_computed_tokens_kernel(args);
}
