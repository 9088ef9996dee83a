#include "host/compute_slot_mapping_.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("compute_slot_mapping_");

void compute_slot_mapping_(const Tensor& query_start_loc, const Tensor& positions, const Tensor& block_table,
                           const std::optional<Tensor>& row_indices, const Tensor& slot_mapping, int64_t block_size,
                           int64_t blocks_per_kv_block, int64_t cp_world, int64_t cp_rank, int64_t cp_interleave,
                           int64_t pad_id) {
  const host::TensorView first = view_of(query_start_loc);
  const ComputeSlotMappingParams p = host::check_compute_slot_mapping_(
      first, view_of(positions), view_of(block_table), OptionalView(row_indices).get(), view_of(slot_mapping),
      block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave, pad_id);
  if (p.num_slots > 0) op.call(first.device, &p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "compute_slot_mapping_(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor? row_indices, "
      "Tensor(a!) slot_mapping, SymInt block_size, SymInt blocks_per_kv_block, SymInt cp_world, SymInt cp_rank, "
      "SymInt cp_interleave, int pad_id) -> ()");
}

NGRAM_NPU_IMPL(compute_slot_mapping_)

}  // namespace
}  // namespace ngram_npu::torch_side
