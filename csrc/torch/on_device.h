// Makes a device current for a kernel call, and finds its current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "host/arguments.h"

namespace ngram_npu::torch_side {

constexpr int32_t kCpu = 0;  // torch's numbering of device types
constexpr int32_t kCuda = 1;
constexpr int32_t kNpu = 20;  // torch's PrivateUse1

// While it exists, an accelerator's device is the current one. Throws if torch cannot return the current stream.
class OnDevice {
 public:
  explicit OnDevice(const host::Device& device) : device_(device), guard_(device.index) {}

  void* stream() const;

 private:
  host::Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace ngram_npu::torch_side
