#include "host/correct_num_computed_tokens_.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("correct_num_computed_tokens_");

void correct_num_computed_tokens_(const Tensor& num_computed_tokens, const Tensor& num_accepted_tokens,
                                  const Tensor& prev_positions, const Tensor& num_sampled_prev,
                                  const Tensor& num_draft_prev, const Tensor& host_num_computed_tokens) {
  const host::TensorView first = view_of(num_computed_tokens);
  const CorrectNumComputedTokensParams p = host::check_correct_num_computed_tokens_(
      first, view_of(num_accepted_tokens), view_of(prev_positions), view_of(num_sampled_prev), view_of(num_draft_prev),
      view_of(host_num_computed_tokens));
  if (p.batch > 0) op.call(first.device, &p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "correct_num_computed_tokens_(Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, "
      "Tensor prev_positions, Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens) -> ()");
}

NGRAM_NPU_IMPL(correct_num_computed_tokens_)

}  // namespace
}  // namespace ngram_npu::torch_side
