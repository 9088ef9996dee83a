#include "host/prepare_inputs.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("prepare_inputs");

std::tuple<Tensor, Tensor, Tensor> prepare_inputs(const Tensor& query_start_loc, const Tensor& seq_lens,
                                                  const Tensor& num_rejected, int64_t total_tokens) {
  const host::TensorView first = view_of(query_start_loc);
  PrepareInputsParams p = host::check_prepare_inputs(first, view_of(seq_lens), view_of(num_rejected), total_tokens);
  Tensor query_start_loc_out = empty_like_on(query_start_loc, {p.batch + 1});
  Tensor seq_lens_out = empty_like_on(query_start_loc, {p.batch});
  Tensor token_indices = empty_like_on(query_start_loc, {p.total_tokens});
  p.query_start_loc_out = int32_data(query_start_loc_out);
  p.seq_lens_out = int32_data(seq_lens_out);
  p.token_indices = int32_data(token_indices);
  op.call(first.device, &p);
  return {query_start_loc_out, seq_lens_out, token_indices};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "prepare_inputs(Tensor query_start_loc, Tensor seq_lens, Tensor num_rejected, SymInt total_tokens) -> "
      "(Tensor query_start_loc_out, Tensor seq_lens_out, Tensor token_indices)");
}

NGRAM_NPU_IMPL(prepare_inputs)

}  // namespace
}  // namespace ngram_npu::torch_side
