#include "core/prepare_input_ids_.h"

#include "ascendc/device.h"

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

// A request's span leaves in pieces of kInputPiece: what it says of its own length may be anything.
extern "C" __global__ __aicore__ void ngram_npu_prepare_input_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<PrepareInputIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  Local<int32_t> ids(pipe, kInputPiece);
  for (int64_t i = first_item(share); i < p.batch; i += items_between(share)) {
    const int64_t prev = p.prev_positions[i];
    if (!p.draft_token_ids.has(prev)) continue;
    const InputSpan span = input_span(p, i);
    for (int64_t n = span.begin; n < span.end; n += kInputPiece) {
      const int64_t count = smaller(kInputPiece, span.end - n);
      for (int64_t j = 0; j < count; ++j) ids.set(j, input_id(p, span, prev, n + j));
      order<AscendC::HardEvent::S_MTE3>();
      ids.store(0, p.input_ids + n, count);
      order<AscendC::HardEvent::MTE3_S>();
    }
  }
}
