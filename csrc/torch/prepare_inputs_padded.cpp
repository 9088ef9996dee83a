#include "host/prepare_inputs_padded.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("prepare_inputs_padded");

std::tuple<Tensor, Tensor> prepare_inputs_padded(const Tensor& cu_num_draft_tokens, const Tensor& num_sampled,
                                                 const Tensor& query_start_loc) {
  const host::TensorView first = view_of(cu_num_draft_tokens);
  PrepareInputsPaddedParams p =
      host::check_prepare_inputs_padded(first, view_of(num_sampled), view_of(query_start_loc));
  Tensor token_indices_to_sample = empty_like_on(cu_num_draft_tokens, {p.batch});
  Tensor num_rejected = empty_like_on(cu_num_draft_tokens, {p.batch});
  if (p.batch > 0) {
    p.token_indices_to_sample = int32_data(token_indices_to_sample);
    p.num_rejected = int32_data(num_rejected);
    op.call(first.device, &p);
  }
  return {token_indices_to_sample, num_rejected};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "prepare_inputs_padded(Tensor cu_num_draft_tokens, Tensor num_sampled, Tensor query_start_loc) -> "
      "(Tensor token_indices_to_sample, Tensor num_rejected)");
}

NGRAM_NPU_IMPL(prepare_inputs_padded)

}  // namespace
}  // namespace ngram_npu::torch_side
