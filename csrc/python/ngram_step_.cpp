#include "host/ngram_step_.h"

#include "python/ops.h"
#include "python/thread_pool.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const ngram_npu::NgramStepParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple ngram_step_(py::handle token_ids, py::handle num_tokens, py::handle sampled_token_ids, py::handle discard,
                      py::handle row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n, int64_t k,
                      int64_t match_policy, bool overlap, int64_t max_len, py::handle workspace) {
  constexpr const char* op = "ngram_step_";
  NgramStepParams p = host::check_ngram_step_(
      *ArrayView(op, "token_ids", token_ids), *ArrayView(op, "num_tokens", num_tokens),
      *ArrayView(op, "sampled_token_ids", sampled_token_ids), ArrayView(op, "discard", discard, true).get(),
      ArrayView(op, "row_indices", row_indices, true).get(), advance, vocab_size, min_n, max_n, k, match_policy,
      overlap, max_len, ArrayView(op, "workspace", workspace, true).get());
  auto next_token_ids = empty(p.batch);
  auto num_sampled = empty(p.batch);
  auto draft_token_ids = empty(p.batch, k);
  auto num_draft_tokens = empty(p.batch);
  auto match_len = empty(p.batch);
  p.next_token_ids = next_token_ids.mutable_data();
  p.num_sampled = num_sampled.mutable_data();
  p.draft_token_ids = draft_token_ids.mutable_data();
  p.num_draft_tokens = num_draft_tokens.mutable_data();
  p.match_len = match_len.mutable_data();
  const Executor executor = pool_executor();
  p.executor = &executor;
  {
    const py::gil_scoped_release released;
    ngram_npu_cpu_ngram_step_(&p, nullptr);
  }
  return py::make_tuple(std::move(next_token_ids), std::move(num_sampled), std::move(draft_token_ids),
                        std::move(num_draft_tokens), std::move(match_len));
}

}  // namespace

void define_ngram_step_(py::module_& m) {
  m.def("ngram_step_", ngram_step_, py::arg("token_ids"), py::arg("num_tokens"), py::arg("sampled_token_ids"),
        py::arg("discard"), py::arg("row_indices"), py::arg("advance"), py::arg("vocab_size"), py::arg("min_n"),
        py::arg("max_n"), py::arg("k"), py::arg("match_policy"), py::arg("overlap"), py::arg("max_len"),
        py::arg("workspace"));
}

}  // namespace ngram_npu::python
