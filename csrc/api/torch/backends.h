// Loads backend libraries and finds the kernel for an operator and a device.
//
// Backend libraries do not depend on torch and are loaded at run time (python/ngram_npu/_library.py). Each exports
// `ngram_npu_<backend>_<op>` for its operators; loading the library registers these kernels for a device type. A host
// twin is an ordinary backend library, which tests load as the backend of a device type. Optional exports:
//   int64_t ngram_npu_<backend>_<op>_workspace(const <Op>Params*)
//       the number of words (int32) of workspace that the kernel needs for this call
//   const char* ngram_npu_<backend>_error()
//       the reason why the calling thread's last launch failed
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "api/call.h"

// torch's headers before 2.13 define this macro with another name.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace ngram_npu::torch_api {

constexpr int32_t kNumDeviceTypes = 32;

using Kernel = int32_t (*)(const void* params, void* stream);
using GetWorkspaceWordsFn = int64_t (*)(const void* params);
using GetLastErrorFn = const char* (*)();

// The kernels that are loaded for an operator, by device type.
class LoadedKernels {
 public:
  explicit LoadedKernels(const char* name) : name_(name) {}

  const char* name() const { return name_; }
  // Runs the device's kernel: on the CPU synchronously, otherwise on the current stream of the device.
  void call(const api::Device& device, const void* params) const;
  // Number of words of workspace that the device's kernel needs for a call; 0 if it needs no workspace, as on the CPU.
  int64_t workspace_words(const api::Device& device, const void* params) const;

  Kernel kernel_for(int32_t device_type) const { return kernels_[device_type]; }
  void set_kernel(int32_t device_type, Kernel kernel, GetWorkspaceWordsFn get_workspace_words) {
    kernels_[device_type] = kernel;
    workspace_functions_[device_type] = get_workspace_words;
  }

 private:
  const char* name_;
  Kernel kernels_[kNumDeviceTypes] = {};
  GetWorkspaceWordsFn workspace_functions_[kNumDeviceTypes] = {};
};

// The kernels of the operator with this index in api::operators(). Operators that share a kernel share the object.
const LoadedKernels& kernels_of(size_t operator_index);

}  // namespace ngram_npu::torch_api

// Returns torch's number of the device type "cpu", "cuda" or "npu"; -1 for any other name.
NGRAM_NPU_EXPORT int32_t ngram_npu_device_type(const char* name);

// Loads the library at `path` and registers its kernels for `device_type`. Returns the number of operators for which
// the library has a kernel, or -1 with the loader's message in `error`. Must not be called while operators run.
NGRAM_NPU_EXPORT int32_t ngram_npu_load_backend(const char* backend, int32_t device_type, const char* path, char* error,
                                                int64_t error_bytes);

// Defers the loading of the library at `path` to the first call of an operator on `device_type`, so that a process
// without such a call never loads it. If loading fails, the call throws an error with the loader's message.
NGRAM_NPU_EXPORT void ngram_npu_defer_backend_loading(const char* backend, int32_t device_type, const char* path);

// Returns 1 if `op` has a loaded kernel for `device_type`, otherwise 0.
NGRAM_NPU_EXPORT int32_t ngram_npu_has_kernel(const char* op, int32_t device_type);
