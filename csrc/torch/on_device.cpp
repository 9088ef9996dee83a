#include "torch/on_device.h"

#include <dlfcn.h>

#include "torch/front_end.h"

namespace ngram_npu::torch_side {
namespace {

// A function of a library that torch has loaded, or null. torch loads libtorch_cuda.so with local symbols, so neither a
// weak symbol nor dlsym(RTLD_DEFAULT) finds its exports.
template <class Function>
Function loaded_function(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle != nullptr ? reinterpret_cast<Function>(dlsym(handle, name)) : nullptr;
}

using CudaStream = AOTITorchError (*)(int32_t device_index, void** stream);
using NativeHandle = AOTITorchError (*)(StreamHandle stream, void** handle);

}  // namespace

void* OnDevice::stream() const {
  if (device_.type == kNpu) return nullptr;  // asking torch_npu would drain its queue; launch.cpp gets the stream
  void* stream = nullptr;
  static const auto cuda_stream = loaded_function<CudaStream>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  if (device_.type == kCuda && cuda_stream != nullptr) {
    STABLE_TORCH_ERROR_CODE_CHECK(cuda_stream(device_.index, &stream));
    return stream;
  }
  // torch >= 2.13 has it for all devices.
  static const auto native_handle = loaded_function<NativeHandle>("libtorch_cpu.so", "torch_stream_native_handle");
  if (native_handle == nullptr) throw std::runtime_error("the device's current stream: expected torch 2.13 or later");
  StreamHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device_.index, &handle));
  const torch::stable::accelerator::Stream owner(handle);
  STABLE_TORCH_ERROR_CODE_CHECK(native_handle(handle, &stream));
  return stream;
}

}  // namespace ngram_npu::torch_side
