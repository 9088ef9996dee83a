#include "host/prepare_next_token_ids.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_next_token_ids(const ngram_npu::PrepareNextTokenIdsParams*, void*);

namespace ngram_npu::python {
namespace {

py::tuple prepare_next_token_ids(py::handle sampled_token_ids, py::handle discard, py::handle backup_token_ids,
                                 py::handle token_ids, py::handle num_tokens, py::handle row_indices,
                                 int64_t vocab_size) {
  constexpr const char* op = "prepare_next_token_ids";
  PrepareNextTokenIdsParams p = host::check_prepare_next_token_ids(
      *ArrayView(op, "sampled_token_ids", sampled_token_ids), ArrayView(op, "discard", discard, true).get(),
      ArrayView(op, "backup_token_ids", backup_token_ids, true).get(),
      ArrayView(op, "token_ids", token_ids, true).get(), ArrayView(op, "num_tokens", num_tokens, true).get(),
      ArrayView(op, "row_indices", row_indices, true).get(), vocab_size);
  auto next_token_ids = empty(p.batch);
  auto num_sampled = empty(p.batch);
  p.next_token_ids = next_token_ids.mutable_data();
  p.num_sampled = num_sampled.mutable_data();
  run(op, ngram_npu_cpu_prepare_next_token_ids, p);
  return py::make_tuple(std::move(next_token_ids), std::move(num_sampled));
}

}  // namespace

void define_prepare_next_token_ids(py::module_& m) {
  m.def("prepare_next_token_ids", prepare_next_token_ids, py::arg("sampled_token_ids"), py::arg("discard"),
        py::arg("backup_token_ids"), py::arg("token_ids"), py::arg("num_tokens"), py::arg("row_indices"),
        py::arg("vocab_size"));
}

}  // namespace ngram_npu::python
