#include "host/ngram_index_reset_.h"

#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("ngram_index_reset_");

void ngram_index_reset_(const Tensor& index, const Tensor& slot_indices) {
  const host::TensorView view = view_of(index);
  const NgramIndexResetParams p = host::check_ngram_index_reset_(view, view_of(slot_indices));
  if (p.count > 0) op.call(view.device, &p);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def("ngram_index_reset_(Tensor(a!) index, Tensor slot_indices) -> ()");
}

NGRAM_NPU_IMPL(ngram_index_reset_)

}  // namespace
}  // namespace ngram_npu::torch_side
