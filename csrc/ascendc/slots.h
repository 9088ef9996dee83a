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

  __aicore__ inline int64_t begin() const { return begin_; }
  __aicore__ inline int64_t end() const { return end_; }
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

// The requests whose tokens may reach into [begin, end), by offsets that do not fall: from the last that begins at or
// before `begin`.
template <class Offsets>
__aicore__ inline int64_t first_request(const Offsets& query_start_loc, int64_t batch, int64_t begin) {
  int64_t low = 0;  // begins at or before, or is the first
  for (int64_t high = batch; high - low > 1;) {
    const int64_t middle = (low + high) / 2;
    if (query_start_loc[middle] <= begin) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A request's blocks, of which a first walk through its tokens asks for those that it needs, and a second has them.
struct AskForBlocks {
  Asked& asked;
  Gm<const int32_t> row;
  __aicore__ inline int32_t operator[](int64_t index) const {
    asked.ask(row + index);
    return -1;
  }
};
struct AskedBlocks {
  const Asked& asked;
  int64_t& next;  // of the blocks, the one this run has asked for
  bool& taken;
  __aicore__ inline int32_t operator[](int64_t) const {
    taken = true;
    return asked[next];
  }
};
template <class Blocks>
struct StagedBlocks {
  Blocks blocks;
  int64_t count;
};

// What the mapping of tokens needs of all requests.
struct StagedSlots {
  Whole<int32_t> query_start_loc;
  WholeIndices row_indices;
  Asked blocks;

  __aicore__ inline StagedSlots(AscendC::TPipe& pipe, const ComputeSlotMappingParams& p, int64_t per_pass)
      : query_start_loc(pipe, p.query_start_loc, p.batch + 1),
        row_indices(pipe, p.row_indices, p.batch),
        blocks(pipe, per_pass) {}

  __aicore__ inline void load() {
    query_start_loc.load();
    row_indices.load();
  }
};

// Asks for the blocks of one request's tokens at the positions in `positions`, as far as both windows have them.
template <class Slot>
__aicore__ inline void ask_for_blocks(const ComputeSlotMappingParams& p, int64_t i, StagedSlots& staged,
                                      const Window<int64_t>& positions, const Window<Slot>& slots) {
  const TokenRange own = slots.within(tokens_of(staged.query_start_loc, i, p.num_slots));
  if (own.begin >= own.end) return;
  const BlockList list = blocks_of(p.block_table, staged.row_indices[i]);
  const int64_t positioned = smaller(own.end, p.num_positions);
  SlotRun run{0, 0, kNoSlot};
  for (int64_t n = own.begin; n < positioned; ++n) {
    const int64_t position = positions.get(n);
    if (in_run(run, position)) continue;
    run = slot_run(p.layout, StagedBlocks<AskForBlocks>{{staged.blocks, list.blocks}, list.count}, position);
  }
}

// The same walk with the blocks there; `next` goes through them.
template <class Slot>
__aicore__ inline void map_request(const ComputeSlotMappingParams& p, int64_t i, const StagedSlots& staged,
                                   int64_t& next, const Window<int64_t>& positions, Window<Slot>& slots) {
  const TokenRange own = slots.within(tokens_of(staged.query_start_loc, i, p.num_slots));
  if (own.begin >= own.end) return;
  const int64_t count = p.block_table.has(staged.row_indices[i]) ? p.block_table.capacity : 0;
  const int64_t positioned = smaller(own.end, p.num_positions);
  SlotRun run{0, 0, kNoSlot};
  for (int64_t n = own.begin; n < positioned; ++n) {
    const int64_t position = positions.get(n);
    if (!in_run(run, position)) {
      bool taken = false;
      run = slot_run(p.layout, StagedBlocks<AskedBlocks>{{staged.blocks, next, taken}, count}, position);
      next += taken;
    }
    const int64_t slot = slot_in_run(run, position);
    slots.set(n, static_cast<Slot>(slot == kNoSlot ? p.pad_id : slot));
  }
  slots.fill({larger(own.begin, positioned), own.end}, static_cast<Slot>(p.pad_id));
}

// What no request's tokens take, up to the end: a captured graph reads all of it.
template <class Slot>
__aicore__ inline void pad_rest(const ComputeSlotMappingParams& p, const StagedSlots& staged, Window<Slot>& slots) {
  slots.fill({larger<int64_t>(staged.query_start_loc[p.batch], 0), p.num_slots}, static_cast<Slot>(p.pad_id));
}

}  // namespace ngram_npu::ascendc
