#include "core/correct_spec_state.h"

#include "ascendc/counts.h"
#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

// Items are the entries of seq_lens: the requests, and zeros behind them. The corrected counts wait for the next
// launch, so that all of this one reads the old ones.
__aicore__ inline void write_requests(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, const Shares& share,
                                      Gm<int32_t> waiting) {
  CountCorrector corrector(pipe, share.per_pass);
  Local<int32_t> seq_lens(pipe, share.per_pass);
  Local<uint8_t> discard(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.num_seq_lens; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.num_seq_lens - first);
    const int64_t requests = smaller(count, p.counts.batch - first);
    corrector.correct(p.counts, waiting, first, requests);
    for (int64_t j = 0; j < count; ++j) {
      if (j < requests) {
        const int32_t seq_len = seq_len_of(p, first + j, corrector.num_computed(j));
        seq_lens.set(j, seq_len);
        if (p.discard != nullptr) discard.set(j, static_cast<uint8_t>(discards(p, first + j, seq_len)));
      } else {
        seq_lens.set(j, 0);
      }
    }
    order<AscendC::HardEvent::S_MTE3>();
    seq_lens.store(0, p.seq_lens + first, count);
    if (p.discard != nullptr) discard.store(0, p.discard + first, requests);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

template <class Slot>
__aicore__ inline void write_tokens(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, const Shares& share) {
  const auto mapping = (Gm<Slot>)p.slots.slot_mapping;
  Window<int64_t> positions(pipe, share.per_pass);
  Window<Slot> slots(pipe, share.per_pass);
  Sequence query_start_loc(pipe, p.slots.query_start_loc, p.slots.batch + 1);
  const int64_t tokens = larger(p.slots.num_positions, p.slots.num_slots);
  for (int64_t first = first_item(share); first < tokens; first += items_between(share)) {
    order<AscendC::HardEvent::S_MTE2>();
    positions.load(p.positions, p.slots.num_positions, first, share.per_pass);
    slots.load(mapping, p.slots.num_slots, first, share.per_pass);
    if (!query_start_loc.has(0)) query_start_loc.load(0);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t i = 0; i < p.counts.batch; ++i) {
      query_start_loc.reach(i);
      const TokenRange own = positions.within(tokens_of(query_start_loc, i, p.slots.num_positions));
      if (own.begin < own.end) {
        const int32_t num_computed = corrected(p.counts, i).num_computed;
        const int32_t begin = query_start_loc[i];
        for (int64_t n = own.begin; n < own.end; ++n) positions.set(n, position_of(n, begin, num_computed));
      }
      map_request(p.slots, i, query_start_loc, positions, slots);
    }
    pad_rest(p.slots, slots);
    order<AscendC::HardEvent::S_MTE3>();
    positions.store(p.positions);
    slots.store(mapping);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_correct_spec_state(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<CorrectSpecStateParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  AscendC::TPipe pipe;
  write_requests(pipe, p, tiling.requests, Gm<int32_t>(args.workspace));
  if (p.slots.slot_bytes == 8) {
    write_tokens<int64_t>(pipe, p, tiling.tokens);
  } else {
    write_tokens<int32_t>(pipe, p, tiling.tokens);
  }
}
