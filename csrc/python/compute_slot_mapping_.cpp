#include "host/compute_slot_mapping_.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_compute_slot_mapping_(const ngram_npu::ComputeSlotMappingParams*, void*);

namespace ngram_npu::python {
namespace {

void compute_slot_mapping_(py::handle query_start_loc, py::handle positions, py::handle block_table,
                           py::handle row_indices, py::handle slot_mapping, int64_t block_size,
                           int64_t blocks_per_kv_block, int64_t cp_world, int64_t cp_rank, int64_t cp_interleave,
                           int64_t pad_id) {
  constexpr const char* op = "compute_slot_mapping_";
  const ComputeSlotMappingParams p = host::check_compute_slot_mapping_(
      *ArrayView(op, "query_start_loc", query_start_loc), *ArrayView(op, "positions", positions),
      *ArrayView(op, "block_table", block_table), ArrayView(op, "row_indices", row_indices, true).get(),
      *ArrayView(op, "slot_mapping", slot_mapping), block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave,
      pad_id);
  run(op, ngram_npu_cpu_compute_slot_mapping_, p);
}

}  // namespace

void define_compute_slot_mapping_(py::module_& m) {
  m.def("compute_slot_mapping_", compute_slot_mapping_, py::arg("query_start_loc"), py::arg("positions"),
        py::arg("block_table"), py::arg("row_indices"), py::arg("slot_mapping"), py::arg("block_size"),
        py::arg("blocks_per_kv_block"), py::arg("cp_world"), py::arg("cp_rank"), py::arg("cp_interleave"),
        py::arg("pad_id"));
}

}  // namespace ngram_npu::python
