#include "core/correct_spec_state.h"

#include <algorithm>

#include "cpu/spec_state.h"

namespace ngram_npu::cpu {
namespace {

void write_positions(const CorrectSpecStateParams& p, int64_t i, int32_t num_computed) {
  const TokenRange own = tokens_of(p.slots.query_start_loc, i, p.slots.num_positions);
  const int32_t begin = p.slots.query_start_loc[i];
  for (int64_t n = own.begin; n < own.end; ++n) p.positions[n] = position_of(n, begin, num_computed);
}

// The positions of one request's tokens are consecutive, so whole runs are written without reading them.
template <class Slot>
void write_slots(const CorrectSpecStateParams& p, int64_t i, int32_t num_computed, const SlotArray<Slot>& slots) {
  const BlockList list = blocks_of(p.slots.block_table, p.slots.row_indices[i]);
  const TokenRange own = tokens_of(p.slots.query_start_loc, i, p.slots.num_slots);
  const int64_t positioned = smaller(own.end, p.slots.num_positions);
  const int32_t begin = p.slots.query_start_loc[i];
  int64_t n = own.begin;
  while (n < positioned) {
    const SlotRun run = slot_run(p.slots.layout, list, position_of(n, begin, num_computed));
    const int64_t count = smaller(run.count, positioned - n);
    if (run.slot == kNoSlot) {
      slots.fill(n, n + count);
    } else {
      for (int64_t j = 0; j < count; ++j) slots.write(n + j, run.slot + j);
    }
    n += count;
  }
  slots.fill(n, own.end);
}

}  // namespace
}  // namespace ngram_npu::cpu

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_spec_state_(const CorrectSpecStateParams* params, void*) {
  const CorrectSpecStateParams& p = *params;
  if (const int32_t status = cpu::correct_counts(p.counts); status != kOk) return status;
  cpu::with_slots(p.slots, [&p](const auto& slots) {
    for (int64_t i = 0; i < p.counts.batch; ++i) {
      const int32_t num_computed = p.counts.num_computed_tokens[i];
      const int32_t seq_len = seq_len_of(p, i, num_computed);
      p.seq_lens[i] = seq_len;
      if (p.discard != nullptr) p.discard[i] = discards(p, i, seq_len);
      cpu::write_positions(p, i, num_computed);
      cpu::write_slots(p, i, num_computed, slots);
    }
    cpu::pad_rest(p.slots, slots);
  });
  std::fill(p.seq_lens + p.counts.batch, p.seq_lens + p.num_seq_lens, 0);
  return kOk;
}
