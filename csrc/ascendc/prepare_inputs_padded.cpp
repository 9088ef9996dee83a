#include "core/prepare_inputs_padded.h"

#include "ascendc/device.h"

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs_padded(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<PrepareInputsPaddedParams>(args.params);
  const Shares share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  Local<int32_t> indices(pipe, share.per_pass);
  Local<int32_t> rejected(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    for (int64_t j = 0; j < count; ++j) {
      const int32_t drafts_rejected = rejected_of(p, first + j);
      rejected.set(j, drafts_rejected);
      indices.set(j, index_to_sample(p, first + j, drafts_rejected));
    }
    order<AscendC::HardEvent::S_MTE3>();
    rejected.store(0, p.num_rejected + first, count);
    indices.store(0, p.token_indices_to_sample + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}
