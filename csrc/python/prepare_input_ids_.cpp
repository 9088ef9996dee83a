#include "host/prepare_input_ids_.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_input_ids_(const ngram_npu::PrepareInputIdsParams*, void*);

namespace ngram_npu::python {
namespace {

void prepare_input_ids_(py::handle input_ids, py::handle query_start_loc, py::handle prev_positions,
                        py::handle next_token_ids, py::handle draft_token_ids, py::handle num_scheduled_drafts,
                        int64_t pad_token) {
  constexpr const char* op = "prepare_input_ids_";
  const PrepareInputIdsParams p = host::check_prepare_input_ids_(
      *ArrayView(op, "input_ids", input_ids), *ArrayView(op, "query_start_loc", query_start_loc),
      *ArrayView(op, "prev_positions", prev_positions), *ArrayView(op, "next_token_ids", next_token_ids),
      *ArrayView(op, "draft_token_ids", draft_token_ids), *ArrayView(op, "num_scheduled_drafts", num_scheduled_drafts),
      pad_token);
  run(op, ngram_npu_cpu_prepare_input_ids_, p);
}

}  // namespace

void define_prepare_input_ids_(py::module_& m) {
  m.def("prepare_input_ids_", prepare_input_ids_, py::arg("input_ids"), py::arg("query_start_loc"),
        py::arg("prev_positions"), py::arg("next_token_ids"), py::arg("draft_token_ids"),
        py::arg("num_scheduled_drafts"), py::arg("pad_token"));
}

}  // namespace ngram_npu::python
