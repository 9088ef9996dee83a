#include "host/ngram_index_step_.h"

#include "python/step_outputs.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const ngram_npu::NgramIndexStepParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple ngram_index_step_(py::handle token_ids, py::handle num_tokens, py::handle sampled_token_ids,
                            py::handle discard, py::handle row_indices, bool advance, int64_t vocab_size, int64_t min_n,
                            int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                            py::handle index, py::handle slot_indices, py::handle workspace) {
  constexpr const char* op = "ngram_index_step_";
  const ArrayView discard_view(op, "discard", discard, true), row_view(op, "row_indices", row_indices, true);
  NgramIndexStepParams p = host::check_ngram_index_step_(
      {*ArrayView(op, "token_ids", token_ids), *ArrayView(op, "num_tokens", num_tokens),
       *ArrayView(op, "sampled_token_ids", sampled_token_ids), discard_view.get(), row_view.get(), advance, vocab_size,
       min_n, max_n, k, match_policy, overlap, max_len},
      *ArrayView(op, "index", index), ArrayView(op, "slot_indices", slot_indices, true).get(),
      ArrayView(op, "workspace", workspace, true).get());
  StepOutputs outputs(p.step);
  run(op, ngram_npu_cpu_ngram_index_step_, p);
  return std::move(outputs).results();
}

}  // namespace

void define_ngram_index_step_(py::module_& m) {
  m.def("ngram_index_step_", ngram_index_step_, py::arg("token_ids"), py::arg("num_tokens"),
        py::arg("sampled_token_ids"), py::arg("discard"), py::arg("row_indices"), py::arg("advance"),
        py::arg("vocab_size"), py::arg("min_n"), py::arg("max_n"), py::arg("k"), py::arg("match_policy"),
        py::arg("overlap"), py::arg("max_len"), py::arg("index"), py::arg("slot_indices"), py::arg("workspace"));
}

}  // namespace ngram_npu::python
