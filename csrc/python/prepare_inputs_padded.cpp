#include "host/prepare_inputs_padded.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs_padded(const ngram_npu::PrepareInputsPaddedParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple prepare_inputs_padded(py::handle cu_num_draft_tokens, py::handle num_sampled, py::handle query_start_loc) {
  constexpr const char* op = "prepare_inputs_padded";
  PrepareInputsPaddedParams p = host::check_prepare_inputs_padded(
      *ArrayView(op, "cu_num_draft_tokens", cu_num_draft_tokens), *ArrayView(op, "num_sampled", num_sampled),
      *ArrayView(op, "query_start_loc", query_start_loc));
  auto token_indices_to_sample = empty(p.batch);
  auto num_rejected = empty(p.batch);
  p.token_indices_to_sample = token_indices_to_sample.mutable_data();
  p.num_rejected = num_rejected.mutable_data();
  run(op, ngram_npu_cpu_prepare_inputs_padded, p);
  return py::make_tuple(std::move(token_indices_to_sample), std::move(num_rejected));
}

}  // namespace

void define_prepare_inputs_padded(py::module_& m) {
  m.def("prepare_inputs_padded", prepare_inputs_padded, py::arg("cu_num_draft_tokens"), py::arg("num_sampled"),
        py::arg("query_start_loc"));
}

}  // namespace ngram_npu::python
