// The few things the LibTorch stable ABI leaves to its users: views for the argument checks, cheap empty tensors,
// torch's threads as an executor, one registration for all devices.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "host/arguments.h"

// The headers of torch before 2.13 know it by another name only.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace ngram_npu::torch_side {

using torch::stable::Tensor;

host::TensorView view_of(const Tensor& tensor);

// An optional argument as the checks take it: a pointer, null where absent.
class OptionalView {
 public:
  explicit OptionalView(const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) view_ = view_of(*tensor);
  }
  const host::TensorView* get() const { return view_.has_value() ? &*view_ : nullptr; }

 private:
  std::optional<host::TensorView> view_;
};

// Uninitialised int32 outputs on the device of `like`.
Tensor empty_like_on(const Tensor& like, std::initializer_list<int64_t> sizes);

inline int32_t* int32_data(const Tensor& tensor) { return static_cast<int32_t*>(tensor.mutable_data_ptr()); }

// One adapter serves every device; the backends' table (backends.h) knows the kernels.
#define NGRAM_NPU_IMPL(op)                                                       \
  STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m) { m.impl(#op, TORCH_BOX(&op)); }  \
  STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CUDA, m) { m.impl(#op, TORCH_BOX(&op)); } \
  STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) { m.impl(#op, TORCH_BOX(&op)); }

// torch's own threads: what at::parallel_for uses, as many as torch.get_num_threads() says.
Executor torch_executor();

}  // namespace ngram_npu::torch_side
