#include "core/correct_spec_state.h"

#include "ascendc/counts.h"
#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

// A pass of requests: the entries of seq_lens, which are the requests and zeros behind them. The corrected counts wait
// for the next launch, so that all of this one reads the old ones.
class RequestPass {
 public:
  const int64_t num_rows;  // and num_tokens: CorrectSpecStateParams', under their names
  Whole<int32_t> num_tokens;

  __aicore__ inline RequestPass(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, int64_t per_pass)
      : num_rows(p.num_rows),
        num_tokens(pipe, p.num_tokens, p.discard != nullptr ? p.num_rows : 0),
        corrector_(pipe, per_pass),
        seq_lens_(pipe, per_pass),
        discard_(pipe, per_pass) {}

  __aicore__ inline void load(const CorrectSpecStateParams& p, int64_t first, int64_t most) {
    first_ = first;
    count_ = smaller(most, p.num_seq_lens - first);
    requests_ = larger<int64_t>(smaller(count_, p.counts.batch - first), 0);
    corrector_.load(p.counts, first, requests_);
  }

  __aicore__ inline void correct(const CorrectSpecStateParams& p, const StagedCounts& counts,
                                 const StagedSlots& slots) {
    corrector_.correct(counts, first_, requests_);
    for (int64_t j = 0; j < requests_; ++j) {
      const int32_t seq_len = wrap_add(corrector_.num_computed(j), scheduled(slots.query_start_loc, first_ + j));
      seq_lens_.set(j, seq_len);
      if (p.discard == nullptr) continue;
      discard_.set(j, static_cast<uint8_t>(row_discards(*this, slots.row_indices[first_ + j], seq_len)));
    }
    for (int64_t j = requests_; j < count_; ++j) seq_lens_.set(j, 0);
  }

  __aicore__ inline void store(const CorrectSpecStateParams& p, Gm<int32_t> waiting) {
    corrector_.store(p.counts, waiting, first_, requests_);
    seq_lens_.store(0, p.seq_lens + first_, count_);
    if (p.discard != nullptr) discard_.store(0, p.discard + first_, requests_);
  }

 private:
  CountCorrector corrector_;
  Local<int32_t> seq_lens_;
  Local<uint8_t> discard_;
  int64_t first_ = 0, count_ = 0, requests_ = 0;
};

// A core has a pass of requests and one of tokens at a time, so that it waits for both together: for the arrays, for
// what single requests and tokens then ask for, and for its results to leave.
template <class Slot>
__aicore__ inline void correct_all(const CorrectSpecStateParams& p, const BatchTiling& tiling, Gm<int32_t> waiting) {
  const auto mapping = (Gm<Slot>)p.slots.slot_mapping;
  const Shares& share = tiling.tokens;
  const int64_t tokens = larger(p.slots.num_positions, p.slots.num_slots);
  AscendC::TPipe pipe;
  StagedCounts counts(pipe, p.counts);
  StagedSlots staged(pipe, p.slots, share.per_pass);
  RequestPass requests(pipe, p, tiling.requests.per_pass);
  Window<int64_t> positions(pipe, share.per_pass);
  Window<Slot> slots(pipe, share.per_pass);
  counts.load();
  staged.load();
  if (p.discard != nullptr) requests.num_tokens.load();
  int64_t first_entry = first_item(tiling.requests);
  for (int64_t first = first_item(share); first < tokens || first_entry < p.num_seq_lens;) {
    const int64_t begin_token = smaller(first, tokens);
    order<AscendC::HardEvent::S_MTE2>();
    requests.load(p, smaller(first_entry, p.num_seq_lens), tiling.requests.per_pass);
    positions.load(p.positions, p.slots.num_positions, begin_token, share.per_pass);
    slots.load(mapping, p.slots.num_slots, begin_token, share.per_pass);
    order<AscendC::HardEvent::MTE2_S>();
    requests.correct(p, counts, staged);
    staged.blocks.clear();
    const int64_t begin = first_request(staged.query_start_loc, p.slots.batch, begin_token);
    int64_t end = begin;
    for (; end < p.slots.batch && staged.query_start_loc[end] < smaller(begin_token + share.per_pass, tokens); ++end) {
      const TokenRange own = positions.within(tokens_of(staged.query_start_loc, end, p.slots.num_positions));
      if (own.begin < own.end) {
        const int32_t num_computed = corrected(counts, end).num_computed;
        const int32_t start = staged.query_start_loc[end];
        for (int64_t n = own.begin; n < own.end; ++n) positions.set(n, position_of(n, start, num_computed));
      }
      ask_for_blocks(p.slots, end, staged, positions, slots);
    }
    order<AscendC::HardEvent::MTE2_S>();
    int64_t next = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p.slots, i, staged, next, positions, slots);
    pad_rest(p.slots, staged, slots);
    order<AscendC::HardEvent::S_MTE3>();
    requests.store(p, waiting);
    positions.store(p.positions);
    slots.store(mapping);
    order<AscendC::HardEvent::MTE3_S>();
    if (first < tokens) first += items_between(share);
    if (first_entry < p.num_seq_lens) first_entry += items_between(tiling.requests);
  }
}

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_correct_spec_state(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<CorrectSpecStateParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  if (p.slots.slot_bytes == 8) {
    correct_all<int64_t>(p, tiling, Gm<int32_t>(args.workspace));
  } else {
    correct_all<int32_t>(p, tiling, Gm<int32_t>(args.workspace));
  }
}
