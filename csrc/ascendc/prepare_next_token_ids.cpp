#include "core/prepare_next_token_ids.h"

#include "ascendc/device.h"

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_prepare_next_token_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<PrepareNextTokenIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  Local<int32_t> tokens(pipe, share.per_pass);
  Local<int32_t> num_sampled(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    for (int64_t j = 0; j < count; ++j) {
      const NextToken next = next_token(p, first + j);
      tokens.set(j, next.token);
      num_sampled.set(j, next.num_sampled);
    }
    order<AscendC::HardEvent::S_MTE3>();
    tokens.store(0, p.next_token_ids + first, count);
    num_sampled.store(0, p.num_sampled + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}
