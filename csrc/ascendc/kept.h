// Counts the tokens that requests keep, with vectors.
#pragma once

#include "ascendc/device.h"
#include "core/prepare_inputs.h"

namespace ngram_npu::ascendc {

// The numbers of tokens that each request of a stretch keeps and drops: a vector version of kept_tokens().
class KeptStretch {
 public:
  __aicore__ inline explicit KeptStretch(AscendC::TPipe& pipe)
      : starts_(pipe, kStretch), kept_(pipe, kStretch), rejected_(pipe, kStretch) {}

  __aicore__ inline void load(const PrepareInputsParams& p, int64_t first) {
    first_ = first;
    const int64_t count = smaller(kStretch, p.batch - first);
    if (count <= 0) return;
    if (first > 0) order<AscendC::HardEvent::S_MTE2>();
    starts_.load(0, p.query_start_loc + first, count);
    kept_.load(0, p.query_start_loc + first + 1, count);  // the requests' ends
    rejected_.load(0, p.num_rejected + first, count);
    order<AscendC::HardEvent::MTE2_V>();
    const auto& kept = kept_.tensor();
    const auto& rejected = rejected_.tensor();
    const auto n = static_cast<int32_t>(count);
    AscendC::Sub(kept, kept, starts_.tensor(), n);
    AscendC::Maxs(kept, kept, 0, n);
    AscendC::Maxs(rejected, rejected, 0, n);
    AscendC::Min(rejected, rejected, kept, n);
    AscendC::Sub(kept, kept, rejected, n);
    order<AscendC::HardEvent::V_S>();
  }

  __aicore__ inline bool has(int64_t i) const { return i < first_ + kStretch; }
  __aicore__ inline int32_t start(int64_t i) const { return starts_.get(i - first_); }
  __aicore__ inline int32_t kept(int64_t i) const { return kept_.get(i - first_); }
  __aicore__ inline int32_t rejected(int64_t i) const { return rejected_.get(i - first_); }
  // The tokens that requests i and i + 1 keep together, read with one load; i is even.
  __aicore__ inline int64_t kept_by_two(int64_t i) const {
    const auto pairs = kept_.tensor().ReinterpretCast<uint64_t>();
    const uint64_t both = pairs.GetValue(static_cast<uint32_t>((i - first_) / 2));
    return static_cast<int64_t>((both & UINT32_MAX) + (both >> 32));
  }

 private:
  Local<int32_t> starts_, kept_, rejected_;
  int64_t first_ = 0;
};

}  // namespace ngram_npu::ascendc
