#include "host/correct_spec_state_.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_spec_state_(const ngram_npu::CorrectSpecStateParams*, void*);

namespace ngram_npu::python {
namespace {

void correct_spec_state_(py::handle num_computed_tokens, py::handle num_accepted_tokens, py::handle positions,
                         py::handle seq_lens, py::handle slot_mapping, py::handle discard, py::handle prev_positions,
                         py::handle num_sampled_prev, py::handle num_draft_prev, py::handle host_num_computed_tokens,
                         py::handle query_start_loc, py::handle num_tokens, py::handle block_table,
                         py::handle row_indices, int64_t block_size, int64_t blocks_per_kv_block, int64_t cp_world,
                         int64_t cp_rank, int64_t cp_interleave, int64_t pad_id, py::handle workspace) {
  constexpr const char* op = "correct_spec_state_";
  const CorrectSpecStateParams p = host::check_correct_spec_state_(
      *ArrayView(op, "num_computed_tokens", num_computed_tokens),
      *ArrayView(op, "num_accepted_tokens", num_accepted_tokens), *ArrayView(op, "positions", positions),
      *ArrayView(op, "seq_lens", seq_lens), *ArrayView(op, "slot_mapping", slot_mapping),
      ArrayView(op, "discard", discard, true).get(), *ArrayView(op, "prev_positions", prev_positions),
      *ArrayView(op, "num_sampled_prev", num_sampled_prev), *ArrayView(op, "num_draft_prev", num_draft_prev),
      *ArrayView(op, "host_num_computed_tokens", host_num_computed_tokens),
      *ArrayView(op, "query_start_loc", query_start_loc), ArrayView(op, "num_tokens", num_tokens, true).get(),
      *ArrayView(op, "block_table", block_table), ArrayView(op, "row_indices", row_indices, true).get(), block_size,
      blocks_per_kv_block, cp_world, cp_rank, cp_interleave, pad_id, ArrayView(op, "workspace", workspace, true).get());
  run(op, ngram_npu_cpu_correct_spec_state_, p);
}

}  // namespace

void define_correct_spec_state_(py::module_& m) {
  m.def("correct_spec_state_", correct_spec_state_, py::arg("num_computed_tokens"), py::arg("num_accepted_tokens"),
        py::arg("positions"), py::arg("seq_lens"), py::arg("slot_mapping"), py::arg("discard"),
        py::arg("prev_positions"), py::arg("num_sampled_prev"), py::arg("num_draft_prev"),
        py::arg("host_num_computed_tokens"), py::arg("query_start_loc"), py::arg("num_tokens"), py::arg("block_table"),
        py::arg("row_indices"), py::arg("block_size"), py::arg("blocks_per_kv_block"), py::arg("cp_world"),
        py::arg("cp_rank"), py::arg("cp_interleave"), py::arg("pad_id"), py::arg("workspace"));
}

}  // namespace ngram_npu::python
