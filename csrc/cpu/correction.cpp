// CPU kernels of the operators that run between two forward passes.
#include "core/correction.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace ngram_npu::cpu {
namespace {

// Returns kOk, or kOutOfMemory with nothing written.
int32_t correct_counts(const CorrectNumComputedTokensParams& p) {
  // The new counts are buffered until all old counts have been read. Smaller batches need no heap memory.
  constexpr int64_t kMaxStackCounts = 2048;
  int32_t stack_counts[kMaxStackCounts];
  std::unique_ptr<int32_t[]> heap_counts;
  int32_t* new_counts = stack_counts;
  if (p.batch > kMaxStackCounts) {
    heap_counts.reset(new (std::nothrow) int32_t[static_cast<size_t>(p.batch)]);
    if (heap_counts == nullptr) return kOutOfMemory;
    new_counts = heap_counts.get();
  }
  for (int64_t i = 0; i < p.batch; ++i) {
    const CorrectedCounts counts = corrected_counts(p, i);
    new_counts[i] = counts.num_computed;
    if (counts.changes_accepted) p.num_accepted_tokens[i] = counts.num_accepted;
  }
  if (p.batch > 0) std::memcpy(p.num_computed_tokens, new_counts, static_cast<size_t>(p.batch) * sizeof(int32_t));
  return kOk;
}

// The entries of a slot mapping; Slot is int32_t or int64_t.
template <class Slot>
struct SlotArray {
  Slot* slots;
  Slot pad_id;

  void write(int64_t n, int64_t slot) const { slots[n] = slot == kNoSlot ? pad_id : static_cast<Slot>(slot); }

  void fill(int64_t begin, int64_t end) const {
    if (begin < end) std::fill(slots + begin, slots + end, pad_id);
  }
};

// Calls fn with the SlotArray for the slot size in the parameters.
template <class Fn>
void call_with_slot_array(const ComputeSlotMappingParams& p, const Fn& fn) {
  if (p.slot_bytes == 8) {
    fn(SlotArray<int64_t>{static_cast<int64_t*>(p.slot_mapping), p.pad_id});
  } else {
    fn(SlotArray<int32_t>{static_cast<int32_t*>(p.slot_mapping), static_cast<int32_t>(p.pad_id)});
  }
}

// Pads the entries after the last request's tokens, because a captured graph reads the whole mapping.
template <class Slot>
void pad_remaining_slots(const ComputeSlotMappingParams& p, const SlotArray<Slot>& slots) {
  slots.fill(larger<int64_t>(p.query_start_loc[p.batch], 0), p.num_slots);
}

void write_positions(const CorrectSpecStateParams& p, int64_t i, int32_t num_computed) {
  const TokenRange request_tokens = request_token_range(p.slots.query_start_loc, i, p.slots.num_positions);
  const int32_t begin = p.slots.query_start_loc[i];
  for (int64_t n = request_tokens.begin; n < request_tokens.end; ++n)
    p.positions[n] = position_of_token(n, begin, num_computed);
}

// Writes the slots of request i. The positions of its tokens are consecutive, so whole runs of slots are written
// without reading `positions`.
template <class Slot>
void write_slots(const CorrectSpecStateParams& p, int64_t i, int32_t num_computed, const SlotArray<Slot>& slots) {
  const BlockList list = blocks_of(p.slots.block_table, p.slots.row_indices[i]);
  const TokenRange request_tokens = request_token_range(p.slots.query_start_loc, i, p.slots.num_slots);
  const int64_t positions_end = smaller(request_tokens.end, p.slots.num_positions);  // later tokens have no slot
  const int32_t begin = p.slots.query_start_loc[i];
  int64_t n = request_tokens.begin;
  while (n < positions_end) {
    const SlotRun run = slot_run(p.slots.layout, list, position_of_token(n, begin, num_computed));
    const int64_t count = smaller(run.count, positions_end - n);
    if (run.slot == kNoSlot) {
      slots.fill(n, n + count);
    } else {
      for (int64_t j = 0; j < count; ++j) slots.write(n + j, run.slot + j);
    }
    n += count;
  }
  slots.fill(n, request_tokens.end);
}

}  // namespace
}  // namespace ngram_npu::cpu

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_num_computed_tokens_(const CorrectNumComputedTokensParams* params,
                                                                    void*) {
  return cpu::correct_counts(*params);
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_compute_slot_mapping_(const ComputeSlotMappingParams* params, void*) {
  const ComputeSlotMappingParams& p = *params;
  cpu::call_with_slot_array(p, [&p](const auto& slots) {
    for (int64_t i = 0; i < p.batch; ++i) {
      const BlockList list = blocks_of(p.block_table, p.row_indices[i]);
      const TokenRange request_tokens = request_token_range(p.query_start_loc, i, p.num_slots);
      const int64_t positions_end = smaller(request_tokens.end, p.num_positions);
      SlotRun run{0, 0, kNoSlot};
      for (int64_t n = request_tokens.begin; n < positions_end; ++n) {
        const int64_t position = p.positions[n];
        if (!is_in_run(run, position)) run = slot_run(p.layout, list, position);
        slots.write(n, slot_at(run, position));
      }
      slots.fill(larger(request_tokens.begin, positions_end), request_tokens.end);
    }
    cpu::pad_remaining_slots(p, slots);
  });
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_spec_state_(const CorrectSpecStateParams* params, void*) {
  const CorrectSpecStateParams& p = *params;
  if (const int32_t status = cpu::correct_counts(p.counts); status != kOk) return status;
  cpu::call_with_slot_array(p.slots, [&p](const auto& slots) {
    for (int64_t i = 0; i < p.counts.batch; ++i) {
      const int32_t num_computed = p.counts.num_computed_tokens[i];
      const int32_t seq_len = sequence_length(p.slots.query_start_loc, i, num_computed);
      p.seq_lens[i] = seq_len;
      if (p.discard != nullptr) p.discard[i] = should_discard(p, i, seq_len);
      cpu::write_positions(p, i, num_computed);
      cpu::write_slots(p, i, num_computed, slots);
    }
    cpu::pad_remaining_slots(p.slots, slots);
  });
  std::fill(p.seq_lens + p.counts.batch, p.seq_lens + p.num_seq_lens, 0);
  return kOk;
}
