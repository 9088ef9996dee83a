#include "core/correct_spec_state.h"

#include "ascendc/request_pass.h"
#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

// The corrected counts of the tokens' requests. Finding out which requests these are takes a wait; if there are few
// requests, correcting all of them is faster than another wait.
class TokenCounts {
 public:
  __aicore__ inline TokenCounts(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p)
      : p_(p), corrector_(pipe, p, larger<int64_t>(smaller(p.batch, kCorrected), 1)) {}

  __aicore__ inline void load_few() {
    if (p_.batch <= kCorrected) load(0);
  }
  __aicore__ inline int32_t num_computed(int64_t i, PreviousCounts& previous) {
    if (!corrector_.has(i)) {
      order<AscendC::HardEvent::S_MTE2>();
      load(i);
      order<AscendC::HardEvent::MTE2_V>();
    }
    if (!corrected_) {
      corrector_.correct(previous);
      order<AscendC::HardEvent::V_S>();
      corrected_ = true;
    }
    return corrector_.num_computed(i);
  }

 private:
  __aicore__ inline void load(int64_t first) {
    corrected_ = false;
    corrector_.load(p_, first, smaller(kCorrected, p_.batch - first));
  }

  const CorrectNumComputedTokensParams& p_;
  CountCorrector corrector_;
  bool corrected_ = false;
};

// A core processes a pass of requests and one of tokens together, so that it waits for both at once: for the arrays,
// for the values that single requests and tokens need, and for the stores of its results.
template <class Slot>
__aicore__ inline void correct_all(const CorrectSpecStateParams& p, const BatchTiling& tiling, Gm<int32_t> waiting) {
  const auto mapping = (Gm<Slot>)p.slots.slot_mapping;
  const Shares& share = tiling.tokens;
  const int64_t tokens = larger(p.slots.num_positions, p.slots.num_slots);
  AscendC::TPipe pipe;
  PreviousCounts previous(pipe, p.counts);
  StagedSlots staged(pipe, p.slots, share.per_pass);
  RequestPass requests(pipe, p, tiling.requests.per_pass);
  TokenCounts counts(pipe, p.counts);
  Window<int64_t> positions(pipe, share.per_pass);
  Window<Slot> slots(pipe, share.per_pass);
  staged.load();
  previous.load();
  counts.load_few();
  requests.load_rows();
  int64_t first_entry = first_item(tiling.requests);
  for (int64_t first = first_item(share); first < tokens || first_entry < p.num_seq_lens;) {
    const int64_t begin_token = smaller(first, tokens);
    const int64_t end_token = smaller(begin_token + share.per_pass, tokens);
    order<AscendC::HardEvent::S_MTE2>();
    requests.load(smaller(first_entry, p.num_seq_lens), tiling.requests.per_pass);
    positions.load(p.positions, p.slots.num_positions, begin_token, share.per_pass);
    slots.load(mapping, p.slots.num_slots, begin_token, share.per_pass);
    // Orders vectors too: they are issued behind this wait.
    order<AscendC::HardEvent::MTE2_S>();
    staged.blocks.clear();
    const int64_t begin = first_request(staged.query_start_loc, p.slots.batch, begin_token);
    int64_t end = begin;
    for (; end < p.slots.batch && staged.query_start_loc[end] < end_token; ++end) {
      const TokenRange own = positions.within(tokens_of(staged.query_start_loc, end, p.slots.num_positions));
      const int32_t start = staged.query_start_loc[end];
      const int32_t num_computed = counts.num_computed(end, previous);
      for (int64_t n = own.begin; n < own.end; ++n) positions.set(n, position_of(n, start, num_computed));
      ask_for_blocks(p.slots, end, staged, positions, slots);
    }
    requests.correct(previous);  // while the blocks are loaded
    order<AscendC::HardEvent::MTE2_S>();
    int64_t next = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p.slots, i, staged, next, positions, slots);
    pad_rest(p.slots, staged, slots);
    order<AscendC::HardEvent::S_MTE3>();
    order<AscendC::HardEvent::V_MTE3>();
    requests.store(waiting);
    positions.store(p.positions);
    slots.store(mapping);
    order<AscendC::HardEvent::MTE3_S>();
    if (first < tokens) first += items_between(share);
    if (first_entry < p.num_seq_lens) first_entry += items_between(tiling.requests);
  }
}

__aicore__ inline void correct_spec_state_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectSpecStateParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  if (p.slots.slot_bytes == 8) {
    correct_all<int64_t>(p, tiling, Gm<int32_t>(args.workspace));
  } else {
    correct_all<int32_t>(p, tiling, Gm<int32_t>(args.workspace));
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_correct_spec_state(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::correct_spec_state_kernel(args);
}
