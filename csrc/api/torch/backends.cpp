// Implements backends.h: loads backend libraries and calls their kernels.
#include "api/torch/backends.h"

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace ngram_npu::torch_api {
namespace {

constexpr int32_t kCpu = 0;  // torch's numbering of device types
constexpr int32_t kCuda = 1;
constexpr int32_t kNpu = 20;  // torch's PrivateUse1

// Returns a function of a library that torch has loaded, or null. torch loads libtorch_cuda.so with local symbols, so
// neither a weak symbol nor dlsym(RTLD_DEFAULT) finds its exports.
template <class Function>
Function find_loaded_function(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle != nullptr ? reinterpret_cast<Function>(dlsym(handle, name)) : nullptr;
}

using GetCudaStreamFn = AOTITorchError (*)(int32_t device_index, void** stream);
using GetNativeHandleFn = AOTITorchError (*)(StreamHandle stream, void** handle);

// Makes an accelerator device the current device during the lifetime of the guard. stream() throws if torch cannot
// return the current stream.
class CurrentDeviceGuard {
 public:
  explicit CurrentDeviceGuard(const api::Device& device) : device_(device), guard_(device.index) {}

  void* stream() const {
    // Querying the stream through torch would wait for torch_npu's task queue; ascendc/launch.cpp queries the stream.
    if (device_.type == kNpu) return nullptr;
    void* stream = nullptr;
    static const auto get_cuda_stream =
        find_loaded_function<GetCudaStreamFn>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
    if (device_.type == kCuda && get_cuda_stream != nullptr) {
      STABLE_TORCH_ERROR_CODE_CHECK(get_cuda_stream(device_.index, &stream));
      return stream;
    }
    // torch >= 2.13 has a function for all devices.
    static const auto get_native_handle =
        find_loaded_function<GetNativeHandleFn>("libtorch_cpu.so", "torch_stream_native_handle");
    if (get_native_handle == nullptr)
      throw std::runtime_error("getting the current stream of this device requires torch 2.13 or later");
    StreamHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device_.index, &handle));
    const torch::stable::accelerator::Stream handle_owner(handle);
    STABLE_TORCH_ERROR_CODE_CHECK(get_native_handle(handle, &stream));
    return stream;
  }

 private:
  api::Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// The kernels with different names, and the position of each operator's kernel among them.
struct KernelList {
  std::vector<LoadedKernels> kernels;
  std::vector<size_t> by_operator;

  KernelList() {
    for (const api::Operator& op : api::operators()) {
      size_t index = 0;
      while (index < kernels.size() && std::strcmp(kernels[index].name(), op.kernel) != 0) ++index;
      if (index == kernels.size()) kernels.emplace_back(op.kernel);
      by_operator.push_back(index);
    }
  }
};

KernelList& kernel_list() {
  static KernelList list;
  return list;
}

GetLastErrorFn last_error_functions[kNumDeviceTypes] = {};

// A backend library that is loaded by the first call of an operator on its device type.
struct DeferredBackend {
  std::atomic<bool> pending{false};
  std::string backend, path;
};
DeferredBackend deferred_backends[kNumDeviceTypes];
std::mutex deferred_mutex;

void load_deferred_backend(const char* op, int32_t device_type) {
  DeferredBackend& deferred = deferred_backends[device_type];
  if (!deferred.pending.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(deferred_mutex);
  if (!deferred.pending.load(std::memory_order_relaxed)) return;
  char error[1024];
  const int32_t num_loaded =
      ngram_npu_load_backend(deferred.backend.c_str(), device_type, deferred.path.c_str(), error, sizeof(error));
  if (num_loaded < 0)
    throw std::runtime_error(std::string(op) + ": failed to load the kernels for this device: " + error);
}

std::string failure_message(const char* op, const api::Device& device, int32_t status) {
  std::string text = std::string(op) + ": the kernel failed: " + api::describe_status(status);
  if (status == kLaunchFailed && last_error_functions[device.type] != nullptr) {
    text += std::string(": ") + last_error_functions[device.type]();
  }
  return text;
}

}  // namespace

const LoadedKernels& kernels_of(size_t operator_index) {
  const KernelList& list = kernel_list();
  return list.kernels[list.by_operator[operator_index]];
}

void LoadedKernels::call(const api::Device& device, const void* params) const {
  const bool is_valid_type = device.type >= 0 && device.type < kNumDeviceTypes;
  if (is_valid_type) load_deferred_backend(name_, device.type);
  const Kernel kernel = is_valid_type ? kernels_[device.type] : nullptr;
  if (kernel == nullptr) {
    throw std::runtime_error(std::string(name_) +
                             ": no kernel is loaded for this device; `ngram-npu doctor` reports the reason");
  }
  int32_t status = kOk;
  if (device.type == kCpu) {
    status = kernel(params, nullptr);
  } else {
    const CurrentDeviceGuard device_guard(device);
    status = kernel(params, device_guard.stream());
  }
  if (status != kOk) throw std::runtime_error(failure_message(name_, device, status));
}

int64_t LoadedKernels::workspace_words(const api::Device& device, const void* params) const {
  const bool is_valid_type = device.type >= 0 && device.type < kNumDeviceTypes;
  if (is_valid_type) load_deferred_backend(name_, device.type);
  const GetWorkspaceWordsFn get_workspace_words = is_valid_type ? workspace_functions_[device.type] : nullptr;
  if (get_workspace_words == nullptr) return 0;
  if (device.type == kCpu) return get_workspace_words(params);
  const CurrentDeviceGuard device_guard(device);
  return get_workspace_words(params);
}

}  // namespace ngram_npu::torch_api

using namespace ngram_npu::torch_api;

int32_t ngram_npu_device_type(const char* name) {
  const std::string_view device = name;
  return device == "cpu" ? kCpu : device == "cuda" ? kCuda : device == "npu" ? kNpu : -1;
}

int32_t ngram_npu_load_backend(const char* backend, int32_t device_type, const char* path, char* error,
                               int64_t error_bytes) {
  const auto fail = [&](const char* reason) {
    if (error_bytes > 0) std::snprintf(error, static_cast<size_t>(error_bytes), "%s", reason);
    return -1;
  };
  if (device_type < 0 || device_type >= kNumDeviceTypes) {
    const std::string reason = "device type: expected 0 to " + std::to_string(kNumDeviceTypes - 1) + ", got ";
    return fail((reason + std::to_string(device_type)).c_str());
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return fail(dlerror());
  int32_t num_loaded = 0;
  for (LoadedKernels& loaded : kernel_list().kernels) {
    const std::string symbol = std::string("ngram_npu_") + backend + "_" + loaded.name();
    // If the library does not have an operator, the kernel of a previously loaded library is removed, because only one
    // backend is active per device.
    loaded.set_kernel(device_type, reinterpret_cast<Kernel>(dlsym(library, symbol.c_str())),
                      reinterpret_cast<GetWorkspaceWordsFn>(dlsym(library, (symbol + "_workspace").c_str())));
    num_loaded += loaded.kernel_for(device_type) != nullptr;
  }
  last_error_functions[device_type] =
      reinterpret_cast<GetLastErrorFn>(dlsym(library, (std::string("ngram_npu_") + backend + "_error").c_str()));
  deferred_backends[device_type].pending.store(false, std::memory_order_release);
  return num_loaded;
}

void ngram_npu_defer_backend_loading(const char* backend, int32_t device_type, const char* path) {
  if (device_type < 0 || device_type >= kNumDeviceTypes) return;
  DeferredBackend& deferred = deferred_backends[device_type];
  deferred.backend = backend;
  deferred.path = path;
  deferred.pending.store(true, std::memory_order_release);
}

int32_t ngram_npu_has_kernel(const char* op_name, int32_t device_type) {
  if (device_type < 0 || device_type >= kNumDeviceTypes) return 0;
  for (const LoadedKernels& loaded : kernel_list().kernels) {
    if (std::strcmp(loaded.name(), op_name) == 0) return loaded.kernel_for(device_type) != nullptr;
  }
  return 0;
}
