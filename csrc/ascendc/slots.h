// Slots of the flat batch, for the operator that reads positions and for the one that makes them.
#pragma once

#include "ascendc/device.h"
#include "core/compute_slot_mapping.h"

namespace ngram_npu::ascendc {

// The part of a token tensor that a core works on: its items [begin, end), staged. Whatever lies outside is left alone,
// and what is not set keeps its value.
template <class T>
class Window {
 public:
  __aicore__ inline Window(AscendC::TPipe& pipe, int64_t capacity) : items_(pipe, capacity) {}

  __aicore__ inline void load(Gm<T> tensor, int64_t size, int64_t first, int64_t count) {
    begin_ = first;
    end_ = smaller(first + count, size);
    items_.load(0, tensor + first, end_ - begin_);
  }
  __aicore__ inline void store(Gm<T> tensor) { items_.store(0, tensor + begin_, end_ - begin_); }

  __aicore__ inline TokenRange within(const TokenRange& range) const {
    return {larger(range.begin, begin_), smaller(range.end, end_)};
  }
  __aicore__ inline T get(int64_t n) const { return items_.get(n - begin_); }
  __aicore__ inline void set(int64_t n, T value) { items_.set(n - begin_, value); }
  __aicore__ inline void fill(const TokenRange& range, T value) {
    const TokenRange own = within(range);
    for (int64_t n = own.begin; n < own.end; ++n) set(n, value);
  }

 private:
  Local<T> items_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

// The slots of one request's tokens at the positions in `positions`, as far as both windows have them.
template <class Slot>
__aicore__ inline void map_request(const ComputeSlotMappingParams& p, int64_t i, const Sequence& query_start_loc,
                                   const Window<int64_t>& positions, Window<Slot>& slots) {
  const TokenRange own = slots.within(tokens_of(query_start_loc, i, p.num_slots));
  if (own.begin >= own.end) return;
  const BlockList list = blocks_of(p.block_table, p.row_indices[i]);
  const int64_t positioned = smaller(own.end, p.num_positions);
  SlotRun run{0, 0, kNoSlot};
  for (int64_t n = own.begin; n < positioned; ++n) {
    const int64_t position = positions.get(n);
    if (!in_run(run, position)) run = slot_run(p.layout, list, position);
    const int64_t slot = slot_in_run(run, position);
    slots.set(n, static_cast<Slot>(slot == kNoSlot ? p.pad_id : slot));
  }
  slots.fill({larger(own.begin, positioned), own.end}, static_cast<Slot>(p.pad_id));
}

// What no request's tokens take, up to the end: a captured graph reads all of it.
template <class Slot>
__aicore__ inline void pad_rest(const ComputeSlotMappingParams& p, Window<Slot>& slots) {
  slots.fill({larger<int64_t>(p.query_start_loc[p.batch], 0), p.num_slots}, static_cast<Slot>(p.pad_id));
}

}  // namespace ngram_npu::ascendc
