// The memory between a call's blocks, where the device's kernel needs some: the caller's, or zeroed memory of the
// call's own.
#pragma once

#include "host/workspace.h"
#include "torch/backends.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {

class Workspace {
 public:
  // `given` null: none was given. `like` tells the device.
  Workspace(const Operator& op, const host::Device& device, const void* params, const host::TensorView* given,
            const Tensor& like) {
    const int64_t words = op.workspace_words(device, params);
    if (words == 0) return;
    if (given != nullptr) {
      host::check_workspace(op.name(), *given, words);
      data_ = given->data;
    } else {
      own_ = empty_like_on(like, {words});
      torch::stable::zero_(*own_);
      data_ = own_->mutable_data_ptr();
    }
  }

  void* data() const { return data_; }  // null where the kernel needs none

 private:
  std::optional<Tensor> own_;  // until the call is queued: torch's allocators keep the order of a stream
  void* data_ = nullptr;
};

}  // namespace ngram_npu::torch_side
