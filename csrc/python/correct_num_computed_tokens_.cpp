#include "host/correct_num_computed_tokens_.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_num_computed_tokens_(const ngram_npu::CorrectNumComputedTokensParams*,
                                                                    void*);

namespace ngram_npu::python {
namespace {

void correct_num_computed_tokens_(py::handle num_computed_tokens, py::handle num_accepted_tokens,
                                  py::handle prev_positions, py::handle num_sampled_prev, py::handle num_draft_prev,
                                  py::handle host_num_computed_tokens) {
  constexpr const char* op = "correct_num_computed_tokens_";
  const CorrectNumComputedTokensParams p = host::check_correct_num_computed_tokens_(
      *ArrayView(op, "num_computed_tokens", num_computed_tokens),
      *ArrayView(op, "num_accepted_tokens", num_accepted_tokens), *ArrayView(op, "prev_positions", prev_positions),
      *ArrayView(op, "num_sampled_prev", num_sampled_prev), *ArrayView(op, "num_draft_prev", num_draft_prev),
      *ArrayView(op, "host_num_computed_tokens", host_num_computed_tokens));
  run(op, ngram_npu_cpu_correct_num_computed_tokens_, p);
}

}  // namespace

void define_correct_num_computed_tokens_(py::module_& m) {
  m.def("correct_num_computed_tokens_", correct_num_computed_tokens_, py::arg("num_computed_tokens"),
        py::arg("num_accepted_tokens"), py::arg("prev_positions"), py::arg("num_sampled_prev"),
        py::arg("num_draft_prev"), py::arg("host_num_computed_tokens"));
}

}  // namespace ngram_npu::python
