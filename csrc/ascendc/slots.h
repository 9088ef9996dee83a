// Maps the tokens of the flat batch to KV cache slots, for compute_slot_mapping_ and correct_spec_state_.
#pragma once

#include "ascendc/device.h"
#include "core/correction.h"

namespace ngram_npu::ascendc {

// The staged items [begin, end) of a tensor with one item per token. Items that are not set keep the tensor's value.
template <class T>
class TokenWindow : public LocalBufferLayout<T> {
 public:
  __aicore__ inline TokenWindow(AscendC::TPipe& pipe, int64_t capacity) : items_(pipe, capacity) {}

  __aicore__ inline void load(Gm<T> tensor, int64_t size, int64_t first, int64_t count) {
    begin_ = first;
    end_ = smaller(first + count, size);
    items_.load(0, tensor + first, end_ - begin_);
  }
  __aicore__ inline void store(Gm<T> tensor) { items_.store(0, tensor + begin_, end_ - begin_); }

  __aicore__ inline int64_t begin() const { return begin_; }
  __aicore__ inline int64_t end() const { return end_; }
  // Returns the part of a range that lies in the window.
  __aicore__ inline TokenRange clip_range(const TokenRange& range) const {
    return {larger(range.begin, begin_), smaller(range.end, end_)};
  }
  __aicore__ inline T get(int64_t n) const { return items_.get(n - begin_); }
  __aicore__ inline void set(int64_t n, T value) { items_.set(n - begin_, value); }
  __aicore__ inline void fill(const TokenRange& range, T value) {
    const TokenRange tokens_in_window = clip_range(range);
    for (int64_t n = tokens_in_window.begin; n < tokens_in_window.end; ++n) set(n, value);
  }
  // Sets the items from `begin` to the end of the window, with a vector instruction from the first multiple of 32
  // bytes.
  __aicore__ inline void fill_to_end(int64_t begin, T value) {
    constexpr int64_t kWords = sizeof(T) / sizeof(int32_t);
    const int64_t first = round_up_items<T>(larger<int64_t>(begin - begin_, 0));
    const auto word = static_cast<int32_t>(value);
    // The 910B has no Duplicate() of int64.
    const bool has_equal_words = kWords == 1 || static_cast<int64_t>(value) >> 32 == word;
    const int64_t vector_begin = has_equal_words ? smaller(begin_ + first, end_) : end_;
    fill({begin, vector_begin}, value);
    if (vector_begin >= end_) return;
    sync_pipes<AscendC::HardEvent::S_V>();
    AscendC::Duplicate(items_.tensor().template ReinterpretCast<int32_t>()[static_cast<uint32_t>(first * kWords)], word,
                       static_cast<int32_t>((end_ - vector_begin) * kWords));
    sync_pipes<AscendC::HardEvent::V_S>();
  }

 private:
  LocalBuffer<T> items_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

// Returns the first request that may have tokens at or after token `begin`: the last request that begins at or before
// this token, if the offsets are sorted.
template <class Offsets>
__aicore__ inline int64_t find_first_request(const Offsets& query_start_loc, int64_t batch, int64_t begin) {
  int64_t low = 0;  // this request begins at or before `begin`, or is the first
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

// Divides by powers of two, as almost all sizes are, with a shift, because an integer division takes much longer.
struct ShiftDivision {
  __aicore__ static inline int64_t divide(int64_t n, int64_t divisor) {
    if ((divisor & (divisor - 1)) != 0) return n / divisor;
    return n >> AscendC::ScalarGetSFFValue<1>(static_cast<uint64_t>(divisor));
  }
};

// The arrays of all requests that the slot mapping needs.
struct StagedSlots : StagedSlotsLayout {
  RandomAccessArray<int32_t> query_start_loc;
  RandomAccessIndices row_indices;
  ScatteredLoads blocks;

  __aicore__ inline StagedSlots(AscendC::TPipe& pipe, const ComputeSlotMappingParams& p, int64_t per_pass)
      : query_start_loc(pipe, p.query_start_loc, p.batch + 1),
        row_indices(pipe, p.row_indices, p.batch),
        blocks(pipe, per_pass) {}

  __aicore__ inline void load() {
    query_start_loc.load();
    row_indices.load();
  }
};

// Loads the block ids for one request's tokens at the positions in `positions`, for tokens in both windows.
template <class Slot>
__aicore__ inline void load_blocks(const ComputeSlotMappingParams& p, int64_t i, StagedSlots& staged_slots,
                                   const TokenWindow<int64_t>& positions, const TokenWindow<Slot>& slots) {
  const TokenRange tokens_in_window =
      slots.clip_range(request_token_range(staged_slots.query_start_loc, i, p.num_slots));
  if (tokens_in_window.begin >= tokens_in_window.end) return;
  const BlockList list = blocks_of(p.block_table, staged_slots.row_indices[i]);
  const int64_t end_with_positions = smaller(tokens_in_window.end, p.num_positions);
  SlotRun run{0, 0, kNoSlot};
  for (int64_t n = tokens_in_window.begin; n < end_with_positions; ++n) {
    const int64_t position = positions.get(n);
    if (is_in_run(run, position)) continue;
    const BlockRun block = block_run<ShiftDivision>(p.layout, position);
    if (block.has_block(list.count)) staged_slots.blocks.request(list.blocks + block.block_index);
    run = slot_run(p.layout, block, -1);
  }
}

// Writes the slots of one request's tokens after the block ids were loaded, with the same loop as load_blocks().
// next_block is the index of the next loaded block id.
template <class Slot>
__aicore__ inline void map_request(const ComputeSlotMappingParams& p, int64_t i, const StagedSlots& staged_slots,
                                   int64_t& next_block, const TokenWindow<int64_t>& positions,
                                   TokenWindow<Slot>& slots) {
  const TokenRange tokens_in_window =
      slots.clip_range(request_token_range(staged_slots.query_start_loc, i, p.num_slots));
  if (tokens_in_window.begin >= tokens_in_window.end) return;
  const int64_t count = p.block_table.has(staged_slots.row_indices[i]) ? p.block_table.capacity : 0;
  const int64_t end_with_positions = smaller(tokens_in_window.end, p.num_positions);
  SlotRun run{0, 0, kNoSlot};
  for (int64_t n = tokens_in_window.begin; n < end_with_positions; ++n) {
    const int64_t position = positions.get(n);
    if (!is_in_run(run, position)) {
      const BlockRun block = block_run<ShiftDivision>(p.layout, position);
      run = slot_run(p.layout, block, block.has_block(count) ? staged_slots.blocks[next_block++] : -1);
    }
    const int64_t slot = slot_at(run, position);
    slots.set(n, static_cast<Slot>(slot == kNoSlot ? p.pad_id : slot));
  }
  slots.fill({larger(tokens_in_window.begin, end_with_positions), tokens_in_window.end}, static_cast<Slot>(p.pad_id));
}

// Pads the entries after the last request's tokens, because a captured graph reads the whole mapping.
template <class Slot>
__aicore__ inline void pad_remaining_slots(const ComputeSlotMappingParams& p, const StagedSlots& staged_slots,
                                           TokenWindow<Slot>& slots) {
  slots.fill_to_end(larger<int64_t>(staged_slots.query_start_loc[p.batch], 0), static_cast<Slot>(p.pad_id));
}

}  // namespace ngram_npu::ascendc
