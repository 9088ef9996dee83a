// The correction of the counts, for the operator that does only that and for the one that goes on from it. Any request
// may need the old count of any other, so the new ones wait in the workspace for the launch that puts them in place.
#pragma once

#include "ascendc/device.h"
#include "core/correct_num_computed_tokens.h"

namespace ngram_npu::ascendc {

// The arrays of CorrectNumComputedTokensParams that are read, under their names.
struct StagedCounts {
  Whole<int32_t> num_computed_tokens, num_sampled_prev, num_draft_prev, host_num_computed_tokens;
  WholeIndices prev_positions;
  int64_t num_previous;

  __aicore__ inline StagedCounts(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p)
      : num_computed_tokens(pipe, p.num_computed_tokens, p.num_previous),
        num_sampled_prev(pipe, p.num_sampled_prev, p.num_previous),
        num_draft_prev(pipe, p.num_draft_prev, p.num_previous),
        host_num_computed_tokens(pipe, p.host_num_computed_tokens, p.batch),
        prev_positions(pipe, p.prev_positions, p.batch),
        num_previous(p.num_previous) {}

  __aicore__ inline void load() {
    prev_positions.load();
    num_draft_prev.load();
    num_sampled_prev.load();
    num_computed_tokens.load();
    host_num_computed_tokens.load();
  }
};

// A pass of requests: their new counts on the way out.
class CountCorrector {
 public:
  __aicore__ inline CountCorrector(AscendC::TPipe& pipe, int64_t per_pass)
      : computed_(pipe, per_pass), accepted_(pipe, per_pass) {}

  __aicore__ inline void load(const CorrectNumComputedTokensParams& p, int64_t first, int64_t count) {
    accepted_.load(0, p.num_accepted_tokens + first, count);
  }
  // num_accepted_tokens is its request's own and written at once.
  __aicore__ inline void correct(const StagedCounts& counts, int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const CorrectedCounts now = corrected(counts, first + j);
      computed_.set(j, now.num_computed);
      if (now.accepted_changes) accepted_.set(j, now.num_accepted);
    }
  }
  __aicore__ inline void store(const CorrectNumComputedTokensParams& p, Gm<int32_t> waiting, int64_t first,
                               int64_t count) {
    computed_.store(0, waiting + first, count);
    accepted_.store(0, p.num_accepted_tokens + first, count);
  }

  __aicore__ inline int32_t num_computed(int64_t j) const { return computed_.get(j); }

 private:
  Local<int32_t> computed_, accepted_;
};

}  // namespace ngram_npu::ascendc
