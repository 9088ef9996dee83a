#include "host/ngram_step_.h"

#include "torch/step_outputs.h"
#include "torch/workspace.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("ngram_step_");

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ngram_step_(
    const Tensor& token_ids, const Tensor& num_tokens, const Tensor& sampled_token_ids,
    const std::optional<Tensor>& discard, const std::optional<Tensor>& row_indices, bool advance, int64_t vocab_size,
    int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
    const std::optional<Tensor>& workspace) {
  const OptionalView discard_view(discard), row_view(row_indices), workspace_view(workspace);
  const host::StepArguments given{view_of(token_ids),
                                  view_of(num_tokens),
                                  view_of(sampled_token_ids),
                                  discard_view.get(),
                                  row_view.get(),
                                  advance,
                                  vocab_size,
                                  min_n,
                                  max_n,
                                  k,
                                  match_policy,
                                  overlap,
                                  max_len};
  NgramStepParams p = host::check_ngram_step_(given, workspace_view.get());
  const StepOutputs outputs(token_ids, p.batch, k);
  if (p.batch > 0) {
    const Workspace memory(op, given.token_ids.device, &p, workspace_view.get(), token_ids);
    p.workspace = memory.data();
    outputs.give_to(p);
    const Executor executor = torch_executor();
    p.executor = &executor;
    op.call(given.token_ids.device, &p);
  }
  return outputs.results();
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "ngram_step_(Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor sampled_token_ids, Tensor? discard, "
      "Tensor? row_indices, bool advance, SymInt vocab_size, SymInt min_n, SymInt max_n, SymInt k, int match_policy, "
      "bool overlap, SymInt max_len, Tensor(w!)? workspace) -> (Tensor next_token_ids, Tensor num_sampled, "
      "Tensor draft_token_ids, Tensor num_draft_tokens, Tensor match_len)");
}

NGRAM_NPU_IMPL(ngram_step_)

}  // namespace
}  // namespace ngram_npu::torch_side
