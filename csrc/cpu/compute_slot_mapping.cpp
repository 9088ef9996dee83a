#include "core/compute_slot_mapping.h"

#include "cpu/spec_state.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_compute_slot_mapping_(const ComputeSlotMappingParams* params, void*) {
  const ComputeSlotMappingParams& p = *params;
  cpu::with_slots(p, [&p](const auto& slots) {
    for (int64_t i = 0; i < p.batch; ++i) {
      const BlockList list = blocks_of(p.block_table, p.row_indices[i]);
      const TokenRange own = tokens_of(p.query_start_loc, i, p.num_slots);
      const int64_t positioned = smaller(own.end, p.num_positions);
      SlotRun run{0, 0, kNoSlot};
      for (int64_t n = own.begin; n < positioned; ++n) {
        const int64_t position = p.positions[n];
        if (!in_run(run, position)) run = slot_run(p.layout, list, position);
        slots.write(n, slot_in_run(run, position));
      }
      slots.fill(larger(own.begin, positioned), own.end);
    }
    cpu::pad_rest(p, slots);
  });
  return kOk;
}
