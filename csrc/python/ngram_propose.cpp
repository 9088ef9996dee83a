#include "host/ngram_propose.h"

#include "python/ops.h"
#include "python/thread_pool.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const ngram_npu::NgramProposeParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple ngram_propose(py::handle token_ids, py::handle num_tokens, py::handle row_indices, py::handle active,
                        int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len) {
  constexpr const char* op = "ngram_propose";
  NgramProposeParams p = host::check_ngram_propose(
      *ArrayView(op, "token_ids", token_ids), *ArrayView(op, "num_tokens", num_tokens),
      ArrayView(op, "row_indices", row_indices, true).get(), ArrayView(op, "active", active, true).get(), min_n, max_n,
      k, match_policy, overlap, max_len);
  auto draft_token_ids = empty(p.batch, k);
  auto num_draft_tokens = empty(p.batch);
  auto match_len = empty(p.batch);
  p.draft_token_ids = draft_token_ids.mutable_data();
  p.num_draft_tokens = num_draft_tokens.mutable_data();
  p.match_len = match_len.mutable_data();
  const Executor executor = pool_executor();
  p.executor = &executor;
  run(op, ngram_npu_cpu_ngram_propose, p);
  return py::make_tuple(std::move(draft_token_ids), std::move(num_draft_tokens), std::move(match_len));
}

}  // namespace

void define_ngram_propose(py::module_& m) {
  m.def("ngram_propose", ngram_propose, py::arg("token_ids"), py::arg("num_tokens"), py::arg("row_indices"),
        py::arg("active"), py::arg("min_n"), py::arg("max_n"), py::arg("k"), py::arg("match_policy"),
        py::arg("overlap"), py::arg("max_len"));
}

}  // namespace ngram_npu::python
