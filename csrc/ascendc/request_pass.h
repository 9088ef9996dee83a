// The per-request results of correct_spec_state_.
#pragma once

#include "ascendc/counts.h"
#include "core/correct_spec_state.h"

namespace ngram_npu::ascendc {

// A pass of requests: the entries of seq_lens, which are the requests followed by zeros. The next launch writes the
// corrected counts, because all cores of this launch read the old ones.
class RequestPass {
 public:
  __aicore__ inline RequestPass(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, int64_t per_pass)
      : p_(p),
        corrector_(pipe, p.counts, per_pass),
        rows_(pipe, p.slots.row_indices, per_pass),
        places_(pipe, per_pass),
        num_tokens_(pipe, p.num_tokens, p.discard != nullptr ? p.num_rows : 0),
        begins_(pipe, per_pass),
        seq_lens_(pipe, per_pass),
        lacking_(pipe, per_pass),
        discards_(pipe, per_pass),
        halves_(pipe, per_pass),
        discard_(pipe, per_pass) {}

  __aicore__ inline void load_rows() { num_tokens_.load(); }
  __aicore__ inline void load(int64_t first, int64_t most) {
    first_ = first;
    count_ = smaller(most, p_.num_seq_lens - first);
    requests_ = larger<int64_t>(smaller(count_, p_.counts.batch - first), 0);
    corrector_.load(p_.counts, first, requests_);
    corrector_.load_accepted(p_.counts);
    begins_.load(0, p_.slots.query_start_loc + first, requests_);
    lacking_.load(0, p_.slots.query_start_loc + first + 1, requests_);  // first the requests' ends
    if (p_.discard != nullptr) rows_.load(first, requests_);
  }

  __aicore__ inline void correct(PreviousCounts& previous) {
    const auto n = static_cast<int32_t>(requests_);
    const Ints& seq_lens = seq_lens_.tensor();
    if (count_ > n) AscendC::Duplicate(seq_lens, 0, static_cast<int32_t>(count_));
    if (n == 0) return;
    corrector_.correct(previous);
    AscendC::Sub(seq_lens, lacking_.tensor(), begins_.tensor(), n);
    AscendC::Add(seq_lens, seq_lens, corrector_.num_computed(), n);
    if (p_.discard != nullptr) discard(seq_lens, n);
  }

  __aicore__ inline void store(Gm<int32_t> waiting) {
    corrector_.store(p_.counts, waiting);
    seq_lens_.store(0, p_.seq_lens + first_, count_);
    if (p_.discard != nullptr) discard_.store(0, p_.discard + first_, requests_);
  }

 private:
  // A vector version of row_discards().
  __aicore__ inline void discard(const Ints& seq_lens, int32_t n) {
    const Ints& indices = rows_.convert(n);
    const Ints& lacking = lacking_.tensor();
    const Ints& reached = begins_.tensor();
    const Ints& discards = discards_.tensor();
    AscendC::Duplicate(discards, 1, n);
    for (int64_t first = 0; first < num_tokens_.size; first += kWhole) {
      places_.find(indices, first, num_tokens_.size, n);
      num_tokens_.gather(lacking, places_, n);
      AscendC::Min(reached, lacking, seq_lens, n);
      AscendC::Sub(lacking, lacking, reached, n);
      to_flags(lacking, n);
      select(discards, lacking, places_.inside(), n);
    }
    const auto mode = AscendC::RoundMode::CAST_RINT;  // the 950 has no CAST_NONE for these
    const auto floats = discards.template ReinterpretCast<float>();
    AscendC::Cast(floats, discards, mode, static_cast<uint32_t>(n));
    AscendC::Cast(halves_.tensor(), floats, mode, static_cast<uint32_t>(n));
    AscendC::Cast(discard_.tensor(), halves_.tensor(), mode, static_cast<uint32_t>(n));
  }

  const CorrectSpecStateParams& p_;
  CountCorrector corrector_;
  PassIndices rows_;
  Places places_;
  Gathered num_tokens_;
  Local<int32_t> begins_, seq_lens_, lacking_, discards_;
  Local<half> halves_;
  Local<uint8_t> discard_;
  int64_t first_ = 0, count_ = 0, requests_ = 0;
};

}  // namespace ngram_npu::ascendc
