// The parts of correct_spec_state_ that are operators of their own: counts corrected, and slot mappings written.
#pragma once

#include <algorithm>

#include "core/compute_slot_mapping.h"
#include "core/correct_num_computed_tokens.h"

namespace ngram_npu::cpu {

// Returns kOk, or kOutOfMemory with nothing written.
int32_t correct_counts(const CorrectNumComputedTokensParams& p);

// A slot mapping of int32 or int64.
template <class Slot>
struct SlotArray {
  Slot* slots;
  Slot pad;

  void write(int64_t n, int64_t slot) const { slots[n] = slot == kNoSlot ? pad : static_cast<Slot>(slot); }

  void fill(int64_t begin, int64_t end) const {
    if (begin < end) std::fill(slots + begin, slots + end, pad);
  }
};

// Calls fn(SlotArray) with the width in the parameters.
template <class Fn>
void with_slots(const ComputeSlotMappingParams& p, const Fn& fn) {
  if (p.slot_bytes == 8) {
    fn(SlotArray<int64_t>{static_cast<int64_t*>(p.slot_mapping), p.pad_id});
  } else {
    fn(SlotArray<int32_t>{static_cast<int32_t*>(p.slot_mapping), static_cast<int32_t>(p.pad_id)});
  }
}

// Pads the places after the last request's tokens, because a captured graph reads the whole mapping.
template <class Slot>
void pad_rest(const ComputeSlotMappingParams& p, const SlotArray<Slot>& slots) {
  slots.fill(larger<int64_t>(p.query_start_loc[p.batch], 0), p.num_slots);
}

}  // namespace ngram_npu::cpu
