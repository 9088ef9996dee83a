#include "host/prepare_input_ids_.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("prepare_input_ids_");

void prepare_input_ids_(const Tensor& input_ids, const Tensor& query_start_loc, const Tensor& prev_positions,
                        const Tensor& next_token_ids, const Tensor& draft_token_ids, const Tensor& num_scheduled_drafts,
                        int64_t pad_token) {
  const host::TensorView first = view_of(input_ids);
  const PrepareInputIdsParams p =
      host::check_prepare_input_ids_(first, view_of(query_start_loc), view_of(prev_positions), view_of(next_token_ids),
                                     view_of(draft_token_ids), view_of(num_scheduled_drafts), pad_token);
  if (p.batch > 0 && p.num_inputs > 0) op.call(first.device, &p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "prepare_input_ids_(Tensor(a!) input_ids, Tensor query_start_loc, Tensor prev_positions, Tensor next_token_ids, "
      "Tensor draft_token_ids, Tensor num_scheduled_drafts, int pad_token) -> ()");
}

NGRAM_NPU_IMPL(prepare_input_ids_)

}  // namespace
}  // namespace ngram_npu::torch_side
