#include "host/prepare_inputs.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs(const ngram_npu::PrepareInputsParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple prepare_inputs(py::handle query_start_loc, py::handle seq_lens, py::handle num_rejected,
                         int64_t total_tokens) {
  constexpr const char* op = "prepare_inputs";
  PrepareInputsParams p = host::check_prepare_inputs(*ArrayView(op, "query_start_loc", query_start_loc),
                                                     *ArrayView(op, "seq_lens", seq_lens),
                                                     *ArrayView(op, "num_rejected", num_rejected), total_tokens);
  auto query_start_loc_out = empty(p.batch + 1);
  auto seq_lens_out = empty(p.batch);
  auto token_indices = empty(p.total_tokens);
  p.query_start_loc_out = query_start_loc_out.mutable_data();
  p.seq_lens_out = seq_lens_out.mutable_data();
  p.token_indices = token_indices.mutable_data();
  run(op, ngram_npu_cpu_prepare_inputs, p);
  return py::make_tuple(std::move(query_start_loc_out), std::move(seq_lens_out), std::move(token_indices));
}

}  // namespace

void define_prepare_inputs(py::module_& m) {
  m.def("prepare_inputs", prepare_inputs, py::arg("query_start_loc"), py::arg("seq_lens"), py::arg("num_rejected"),
        py::arg("total_tokens"));
}

}  // namespace ngram_npu::python
