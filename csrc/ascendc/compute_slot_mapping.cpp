#include "core/compute_slot_mapping.h"

#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

// Cores share the tokens rather than the requests, because one request may have most of them.
template <class Slot>
__aicore__ inline void map_tokens(const ComputeSlotMappingParams& p, const Shares& share) {
  const auto mapping = (Gm<Slot>)p.slot_mapping;
  const auto given = (Gm<int64_t>)p.positions;  // without const, because windows can be written; this one is not
  AscendC::TPipe pipe;
  StagedSlots staged(pipe, p, share.per_pass);
  Window<int64_t> positions(pipe, share.per_pass);
  Window<Slot> slots(pipe, share.per_pass);
  staged.load();
  for (int64_t first = first_item(share); first < p.num_slots; first += items_between(share)) {
    order<AscendC::HardEvent::S_MTE2>();
    positions.load(given, p.num_positions, first, share.per_pass);
    slots.load(mapping, p.num_slots, first, share.per_pass);
    order<AscendC::HardEvent::MTE2_S>();
    staged.blocks.clear();
    const int64_t begin = first_request(staged.query_start_loc, p.batch, first);
    int64_t end = begin;
    for (; end < p.batch && staged.query_start_loc[end] < slots.end(); ++end) {
      ask_for_blocks(p, end, staged, positions, slots);
    }
    order<AscendC::HardEvent::MTE2_S>();
    int64_t next = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p, i, staged, next, positions, slots);
    pad_rest(p, staged, slots);
    order<AscendC::HardEvent::S_MTE3>();
    slots.store(mapping);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

__aicore__ inline void compute_slot_mapping_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<ComputeSlotMappingParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  if (p.slot_bytes == 8) {
    map_tokens<int64_t>(p, share);
  } else {
    map_tokens<int32_t>(p, share);
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_compute_slot_mapping(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::compute_slot_mapping_kernel(args);
}
