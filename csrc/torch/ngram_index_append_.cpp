#include "host/ngram_index_append_.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("ngram_index_append_");

void ngram_index_append_(const Tensor& token_ids, const Tensor& num_tokens, const std::optional<Tensor>& row_indices,
                         const Tensor& index, const std::optional<Tensor>& slot_indices, int64_t min_n, int64_t max_n,
                         int64_t match_policy) {
  const host::TensorView tokens = view_of(token_ids);
  NgramIndexAppendParams p =
      host::check_ngram_index_append_(tokens, view_of(num_tokens), OptionalView(row_indices).get(), view_of(index),
                                      OptionalView(slot_indices).get(), min_n, max_n, match_policy);
  if (p.batch == 0) return;
  const Executor executor = torch_executor();
  p.executor = &executor;
  op.call(tokens.device, &p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "ngram_index_append_(Tensor token_ids, Tensor num_tokens, Tensor? row_indices, Tensor(a!) index, "
      "Tensor? slot_indices, SymInt min_n, SymInt max_n, int match_policy) -> ()");
}

NGRAM_NPU_IMPL(ngram_index_append_)

}  // namespace
}  // namespace ngram_npu::torch_side
