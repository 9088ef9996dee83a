#include "core/prepare_input_ids.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// Pieces leave from places of their own in turn, so that none waits for the one before it. A request's span may take
// several: what it says of its own length may be anything.
class Pieces {
 public:
  __aicore__ inline explicit Pieces(AscendC::TPipe& pipe) : ids_(pipe, kInputPieces * kInputPiece) {}

  __aicore__ inline void write(const PrepareInputIdsParams& p, int64_t i) {
    const int64_t prev = p.prev_positions[i];
    if (!p.draft_token_ids.has(prev)) return;
    const InputSpan span = input_span(p, i);
    for (int64_t first = span.begin; first < span.end; first += kInputPiece) {
      const int64_t count = smaller(kInputPiece, span.end - first);
      for (int64_t j = 0; j < count; ++j) ids_.set(place_ + j, input_id(p, span, prev, first + j));
      order<AscendC::HardEvent::S_MTE3>();
      ids_.store(place_, p.input_ids + first, count);
      place_ += kInputPiece;
      if (place_ < kInputPieces * kInputPiece) continue;
      order<AscendC::HardEvent::MTE3_S>();
      place_ = 0;
    }
  }

 private:
  Local<int32_t> ids_;
  int64_t place_ = 0;
};

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_prepare_input_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<PrepareInputIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  Pieces pieces(pipe);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t end = smaller(first + share.per_pass, p.batch);
    for (int64_t i = first; i < end; ++i) pieces.write(p, i);
  }
}
