#include "host/ngram_propose.h"

#include "torch/workspace.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("ngram_propose");

std::tuple<Tensor, Tensor, Tensor> ngram_propose(const Tensor& token_ids, const Tensor& num_tokens,
                                                 const std::optional<Tensor>& row_indices,
                                                 const std::optional<Tensor>& active, int64_t min_n, int64_t max_n,
                                                 int64_t k, int64_t match_policy, bool overlap, int64_t max_len) {
  const host::TensorView tokens = view_of(token_ids);
  NgramProposeParams p =
      host::check_ngram_propose(tokens, view_of(num_tokens), OptionalView(row_indices).get(),
                                OptionalView(active).get(), min_n, max_n, k, match_policy, overlap, max_len);
  Tensor draft_token_ids = empty_like_on(token_ids, {p.batch, k});
  Tensor num_draft_tokens = empty_like_on(token_ids, {p.batch});
  Tensor match_len = empty_like_on(token_ids, {p.batch});
  if (p.batch > 0) {
    p.draft_token_ids = int32_data(draft_token_ids);
    p.num_draft_tokens = int32_data(num_draft_tokens);
    p.match_len = int32_data(match_len);
    const Executor executor = torch_executor();
    p.executor = &executor;
    const Workspace workspace(op, tokens.device, &p, nullptr, token_ids);
    p.workspace = workspace.data();
    op.call(tokens.device, &p);
  }
  return {draft_token_ids, num_draft_tokens, match_len};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "ngram_propose(Tensor token_ids, Tensor num_tokens, Tensor? row_indices, Tensor? active, SymInt min_n, "
      "SymInt max_n, SymInt k, int match_policy, bool overlap, SymInt max_len) -> (Tensor draft_token_ids, "
      "Tensor num_draft_tokens, Tensor match_len)");
}

NGRAM_NPU_IMPL(ngram_propose)

}  // namespace
}  // namespace ngram_npu::torch_side
