// The torch front end: passes tensors of the LibTorch stable ABI to the operator implementations
// (csrc/api/arguments.h).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "api/arguments.h"
#include "api/torch/backends.h"

// torch's headers before 2.13 define this macro with another name.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace ngram_npu::torch_api {

using torch::stable::Tensor;

api::TensorView view_of(const Tensor& tensor);

// Returns an uninitialised tensor of int32 or int64 on the device of `like`.
Tensor empty_on_device_of(const Tensor& like, std::initializer_list<int64_t> sizes, int64_t item_bytes = 4);

// Returns an executor that uses torch's thread pool (at::parallel_for) with torch.get_num_threads() threads.
Executor torch_executor();

// The workspace of a call: the caller's tensor, memory for this call, or no memory if the kernel needs none.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(void* data) : data_(data) {}
  explicit Workspace(Tensor tensor) : tensor_(std::move(tensor)), data_(tensor_->mutable_data_ptr()) {}

  void* data() const { return data_; }  // null if the kernel needs no workspace

 private:
  // The tensor is freed as soon as the kernel is enqueued, which is safe because torch's allocators are stream-ordered.
  std::optional<Tensor> tensor_;
  void* data_ = nullptr;
};

class TorchCall : public api::Arguments {
 public:
  using In = const Tensor&;
  using Optional = const std::optional<Tensor>&;
  using Output = Tensor;
  using Arguments::Arguments;

  api::TensorView view(const char* name, In tensor) {
    api::TensorView view = view_of(tensor);
    view.name = name;
    if (first_argument_ == nullptr) {
      first_argument_ = &tensor;
      device_ = view.device;
    }
    return view;
  }
  std::optional<api::TensorView> view(const char* name, Optional tensor) const {
    if (!tensor.has_value()) return std::nullopt;
    api::TensorView view = view_of(*tensor);
    view.name = name;
    return view;
  }

  Tensor empty(int64_t size) const { return empty_on_device_of(*first_argument_, {size}); }
  Tensor empty(int64_t rows, int64_t columns) const { return empty_on_device_of(*first_argument_, {rows, columns}); }
  static int32_t* data(Tensor& tensor) { return static_cast<int32_t*>(tensor.mutable_data_ptr()); }
  Tensor empty_tokens(int64_t item_bytes, int64_t rows, int64_t columns) const {
    return empty_on_device_of(*first_argument_, {rows, columns}, item_bytes);
  }
  static void* tokens(Tensor& tensor) { return tensor.mutable_data_ptr(); }

  template <class Op>
  Workspace workspace(const typename Op::Params& params, const std::optional<api::TensorView>& workspace) const {
    const int64_t words = kOperator<Op>.workspace_words(device_, &params);
    if (words == 0) return Workspace();
    if (!workspace) return Workspace(empty(words));
    check_workspace_size(*workspace, words);
    return Workspace(workspace->data);
  }

  template <class Op>
  void run(const typename Op::Params& params) const {
    kOperator<Op>.call(device_, &params);
  }

  template <class... Tensors>
  static std::tuple<Tensors...> results(Tensors&... tensors) {
    return {std::move(tensors)...};
  }

  static Executor executor() { return torch_executor(); }

 private:
  template <class Op>
  static Operator kOperator;

  const Tensor* first_argument_ = nullptr;
  api::Device device_;
};

template <class Op>
Operator TorchCall::kOperator{Op::kName};

}  // namespace ngram_npu::torch_api
