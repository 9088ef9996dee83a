// Corrects the counts, for correct_num_computed_tokens_ and correct_spec_state_. Any request may need the old count of
// any other request. A second launch therefore copies the new counts from the workspace to num_computed_tokens.
#pragma once

#include "ascendc/gather.h"
#include "core/correction.h"

namespace ngram_npu::ascendc {

// The arrays of the previous step, with the same member names as in the parameters.
struct PreviousCounts : PreviousCountsLayout {
  GatherSource num_computed_tokens, num_sampled_prev, num_draft_prev;

  __aicore__ inline PreviousCounts(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p)
      : num_computed_tokens(pipe, p.num_computed_tokens, p.num_previous),
        num_sampled_prev(pipe, p.num_sampled_prev, p.num_previous),
        num_draft_prev(pipe, p.num_draft_prev, p.num_previous) {}

  __aicore__ inline void load() {
    num_draft_prev.load();
    num_sampled_prev.load();
    num_computed_tokens.load();
  }
};

// Corrects the counts of a pass of requests: a vector version of corrected_counts() in core/correction.h.
class CountCorrector : public CountCorrectorLayout {
 public:
  __aicore__ inline CountCorrector(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p, int64_t per_pass)
      : prev_positions_(pipe, p.prev_positions, per_pass),
        gather_offsets_(pipe, per_pass),
        computed_(pipe, per_pass),
        accepted_(pipe, per_pass),
        drafted_(pipe, per_pass),
        sampled_(pipe, per_pass),
        scratch_(pipe, per_pass) {}

  // Loads the host's counts, which requests without drafts in the previous step keep.
  __aicore__ inline void load(const CorrectNumComputedTokensParams& p, int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    prev_positions_.load(first, count);
    computed_.load(0, p.host_num_computed_tokens + first, count);
  }
  // This launch updates num_accepted_tokens in place, so only the core that writes a request's value may load it.
  __aicore__ inline void load_accepted(const CorrectNumComputedTokensParams& p) {
    updates_accepted_ = true;
    accepted_.load(0, p.num_accepted_tokens + first_, count_);
  }

  __aicore__ inline void correct(PreviousCounts& previous) {
    if (count_ <= 0) return;
    const auto n = static_cast<int32_t>(count_);
    const int64_t size = previous.num_draft_prev.size;
    const Ints& indices = prev_positions_.convert(n);
    const Ints& drafted = drafted_.tensor();
    const Ints& sampled = sampled_.tensor();
    const Ints& scratch = scratch_.tensor();
    for (int64_t first = 0; first < size; first += kMaxStagedItems) {
      gather_offsets_.compute(indices, first, size, n);
      previous.num_draft_prev.gather(drafted, gather_offsets_, n);
      previous.num_sampled_prev.gather(sampled, gather_offsets_, n);
      // Limits `sampled` to `drafted` + 1. The sum is not computed, because it could overflow.
      AscendC::Min(scratch, sampled, drafted, n);
      AscendC::Sub(sampled, sampled, scratch, n);
      AscendC::Mins(sampled, sampled, 1, n);
      AscendC::Add(sampled, sampled, scratch, n);
      previous.num_computed_tokens.gather(scratch, gather_offsets_, n);
      AscendC::Add(scratch, scratch, sampled, n);
      // From here on, `drafted` is a flag: the request had drafts, and its index is in the staged part.
      AscendC::Maxs(drafted, drafted, 0, n);
      AscendC::Mins(drafted, drafted, 1, n);
      AscendC::Mul(drafted, drafted, gather_offsets_.range_flags(), n);
      select(computed_.tensor(), scratch, drafted, n);
      if (updates_accepted_) select(accepted_.tensor(), sampled, drafted, n);
    }
  }
  __aicore__ inline void store(const CorrectNumComputedTokensParams& p, Gm<int32_t> new_counts) {
    computed_.store(0, new_counts + first_, count_);
    accepted_.store(0, p.num_accepted_tokens + first_, count_);  // requires load_accepted()
  }

  __aicore__ inline bool has(int64_t i) const { return first_ <= i && i < first_ + count_; }
  __aicore__ inline int32_t num_computed(int64_t i) const { return computed_.get(i - first_); }
  __aicore__ inline const Ints& num_computed() const { return computed_.tensor(); }

 private:
  PassIndices prev_positions_;
  GatherOffsets gather_offsets_;
  LocalBuffer<int32_t> computed_, accepted_, drafted_, sampled_, scratch_;
  int64_t first_ = 0, count_ = 0;
  bool updates_accepted_ = false;
};

}  // namespace ngram_npu::ascendc
