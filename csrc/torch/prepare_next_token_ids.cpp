#include "host/prepare_next_token_ids.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("prepare_next_token_ids");

std::tuple<Tensor, Tensor> prepare_next_token_ids(const Tensor& sampled_token_ids, const std::optional<Tensor>& discard,
                                                  const std::optional<Tensor>& backup_token_ids,
                                                  const std::optional<Tensor>& token_ids,
                                                  const std::optional<Tensor>& num_tokens,
                                                  const std::optional<Tensor>& row_indices, int64_t vocab_size) {
  const host::TensorView first = view_of(sampled_token_ids);
  PrepareNextTokenIdsParams p = host::check_prepare_next_token_ids(
      first, OptionalView(discard).get(), OptionalView(backup_token_ids).get(), OptionalView(token_ids).get(),
      OptionalView(num_tokens).get(), OptionalView(row_indices).get(), vocab_size);
  Tensor next_token_ids = empty_like_on(sampled_token_ids, {p.batch});
  Tensor num_sampled = empty_like_on(sampled_token_ids, {p.batch});
  if (p.batch > 0) {
    p.next_token_ids = int32_data(next_token_ids);
    p.num_sampled = int32_data(num_sampled);
    op.call(first.device, &p);
  }
  return {next_token_ids, num_sampled};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "prepare_next_token_ids(Tensor sampled_token_ids, Tensor? discard, Tensor? backup_token_ids, Tensor? token_ids, "
      "Tensor? num_tokens, Tensor? row_indices, SymInt vocab_size) -> (Tensor next_token_ids, Tensor num_sampled)");
}

NGRAM_NPU_IMPL(prepare_next_token_ids)

}  // namespace
}  // namespace ngram_npu::torch_side
