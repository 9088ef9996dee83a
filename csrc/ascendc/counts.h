// The correction of the counts, for correct_num_computed_tokens_ and correct_spec_state_. Any request may need the old
// count of any other, so the new counts stay in the workspace until a second launch copies them into place.
#pragma once

#include "ascendc/gather.h"
#include "core/correction.h"

namespace ngram_npu::ascendc {

// The arrays of the previous step, under their names in the parameters.
struct PreviousCounts {
  Gathered num_computed_tokens, num_sampled_prev, num_draft_prev;

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

// The counts of a pass of requests: a vector version of corrected() in core/correction.h.
class CountCorrector {
 public:
  __aicore__ inline CountCorrector(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p, int64_t per_pass)
      : prev_positions_(pipe, p.prev_positions, per_pass),
        places_(pipe, per_pass),
        computed_(pipe, per_pass),
        accepted_(pipe, per_pass),
        drafted_(pipe, per_pass),
        sampled_(pipe, per_pass),
        gained_(pipe, per_pass) {}

  // The count of a request without a correction: the host's.
  __aicore__ inline void load(const CorrectNumComputedTokensParams& p, int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    prev_positions_.load(first, count);
    computed_.load(0, p.host_num_computed_tokens + first, count);
  }
  // num_accepted_tokens are written at once, so only the request's own core may load them.
  __aicore__ inline void load_accepted(const CorrectNumComputedTokensParams& p) {
    accepts_ = true;
    accepted_.load(0, p.num_accepted_tokens + first_, count_);
  }

  __aicore__ inline void correct(PreviousCounts& previous) {
    if (count_ <= 0) return;
    const auto n = static_cast<int32_t>(count_);
    const int64_t size = previous.num_draft_prev.size;
    const Ints& indices = prev_positions_.convert(n);
    const Ints& drafted = drafted_.tensor();
    const Ints& sampled = sampled_.tensor();
    const Ints& gained = gained_.tensor();
    for (int64_t first = 0; first < size; first += kWhole) {
      places_.find(indices, first, size, n);
      previous.num_draft_prev.gather(drafted, places_, n);
      previous.num_sampled_prev.gather(sampled, places_, n);
      // At most the drafts plus one, without computing this sum, which could overflow.
      AscendC::Min(gained, sampled, drafted, n);
      AscendC::Sub(sampled, sampled, gained, n);
      AscendC::Mins(sampled, sampled, 1, n);
      AscendC::Add(sampled, sampled, gained, n);
      previous.num_computed_tokens.gather(gained, places_, n);
      AscendC::Add(gained, gained, sampled, n);
      AscendC::Maxs(drafted, drafted, 0, n);
      AscendC::Mins(drafted, drafted, 1, n);
      AscendC::Mul(drafted, drafted, places_.inside(), n);
      select(computed_.tensor(), gained, drafted, n);
      if (accepts_) select(accepted_.tensor(), sampled, drafted, n);
    }
  }
  __aicore__ inline void store(const CorrectNumComputedTokensParams& p, Gm<int32_t> waiting) {
    computed_.store(0, waiting + first_, count_);
    accepted_.store(0, p.num_accepted_tokens + first_, count_);
  }

  __aicore__ inline bool has(int64_t i) const { return first_ <= i && i < first_ + count_; }
  __aicore__ inline int32_t num_computed(int64_t i) const { return computed_.get(i - first_); }
  __aicore__ inline const Ints& num_computed() const { return computed_.tensor(); }

 private:
  PassIndices prev_positions_;
  Places places_;
  Local<int32_t> computed_, accepted_, drafted_, sampled_, gained_;
  int64_t first_ = 0, count_ = 0;
  bool accepts_ = false;
};

}  // namespace ngram_npu::ascendc
