// The correction of the counts, for the operator that does only that and for the one that goes on from it. Any request
// may need the old count of any other, so the new ones wait in the workspace for the launch that puts them in place.
#pragma once

#include "ascendc/device.h"
#include "core/correct_num_computed_tokens.h"

namespace ngram_npu::ascendc {

class CountCorrector {
 public:
  __aicore__ inline CountCorrector(AscendC::TPipe& pipe, int64_t per_pass)
      : computed_(pipe, per_pass), accepted_(pipe, per_pass) {}

  // Requests [first, first + count). num_accepted_tokens is its request's own and written at once.
  __aicore__ inline void correct(const CorrectNumComputedTokensParams& p, Gm<int32_t> waiting, int64_t first,
                                 int64_t count) {
    order<AscendC::HardEvent::S_MTE2>();
    accepted_.load(0, p.num_accepted_tokens + first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const CorrectedCounts counts = corrected(p, first + j);
      computed_.set(j, counts.num_computed);
      if (counts.accepted_changes) accepted_.set(j, counts.num_accepted);
    }
    order<AscendC::HardEvent::S_MTE3>();
    computed_.store(0, waiting + first, count);
    accepted_.store(0, p.num_accepted_tokens + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }

  __aicore__ inline int32_t num_computed(int64_t j) const { return computed_.get(j); }

 private:
  Local<int32_t> computed_, accepted_;
};

}  // namespace ngram_npu::ascendc
