#include "host/ngram_index_append_.h"

#include "python/ops.h"
#include "python/thread_pool.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams*, void*);

namespace ngram_npu::python {
namespace {

void ngram_index_append_(py::handle token_ids, py::handle num_tokens, py::handle row_indices, py::handle index,
                         py::handle slot_indices, int64_t min_n, int64_t max_n, int64_t match_policy) {
  constexpr const char* op = "ngram_index_append_";
  NgramIndexAppendParams p = host::check_ngram_index_append_(
      *ArrayView(op, "token_ids", token_ids), *ArrayView(op, "num_tokens", num_tokens),
      ArrayView(op, "row_indices", row_indices, true).get(), *ArrayView(op, "index", index),
      ArrayView(op, "slot_indices", slot_indices, true).get(), min_n, max_n, match_policy);
  const Executor executor = pool_executor();
  p.executor = &executor;
  run(op, ngram_npu_cpu_ngram_index_append_, p);
}

}  // namespace

void define_ngram_index_append_(py::module_& m) {
  m.def("ngram_index_append_", ngram_index_append_, py::arg("token_ids"), py::arg("num_tokens"), py::arg("row_indices"),
        py::arg("index"), py::arg("slot_indices"), py::arg("min_n"), py::arg("max_n"), py::arg("match_policy"));
}

}  // namespace ngram_npu::python
