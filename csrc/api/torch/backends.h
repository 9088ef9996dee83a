// Finds the backend's kernel for an operator and a device.
//
// Backend libraries are torch-free and loaded at run time (python/ngram_npu/_library.py); each exports
// `ngram_npu_<backend>_<op>`. Loading one registers its kernels for a device. A host twin is a backend library like any
// other backend library, so tests load it for a device. Optional exports:
//   int64_t ngram_npu_<backend>_<op>_workspace(const <Op>Params*)   words of workspace for this call, 0: none
//   const char* ngram_npu_<backend>_error()                        why the calling thread's last launch failed
#pragma once

#include "api/arguments.h"

namespace ngram_npu::torch_api {

constexpr int32_t kNumDeviceTypes = 32;

using Kernel = int32_t (*)(const void* params, void* stream);
using WorkspaceWords = int64_t (*)(const void* params);
using LastError = const char* (*)();

// One static object per operator; its constructor adds it to the list of all operators.
class Operator {
 public:
  explicit Operator(const char* name);

  const char* name() const { return name_; }
  // Runs the device's kernel: on the CPU synchronously, otherwise on the current stream of the device.
  void call(const api::Device& device, const void* params) const;
  // Words of workspace that the device's kernel needs for a call; 0 on the CPU.
  int64_t workspace_words(const api::Device& device, const void* params) const;

  static Operator* first();
  Operator* next() const { return next_; }
  Kernel kernel_for(int32_t device_type) const { return kernels_[device_type]; }
  void set_kernel(int32_t device_type, Kernel kernel, WorkspaceWords workspace) {
    kernels_[device_type] = kernel;
    workspaces_[device_type] = workspace;
  }

 private:
  const char* name_;
  Kernel kernels_[kNumDeviceTypes] = {};
  WorkspaceWords workspaces_[kNumDeviceTypes] = {};
  Operator* next_;
};

}  // namespace ngram_npu::torch_api

// torch's number for "cpu", "cuda" or "npu"; -1 for another name.
NGRAM_NPU_EXPORT int32_t ngram_npu_device_type(const char* name);

// Loads the library at `path` and registers its kernels for `device_type`. Returns the number of operators that it
// has, or -1 with the loader's message in `error`. Must not be called while operators run.
NGRAM_NPU_EXPORT int32_t ngram_npu_load_backend(const char* backend, int32_t device_type, const char* path, char* error,
                                                int64_t error_bytes);

// Lets the first call of an operator on `device_type` load the library at `path`, so that a process without such a call
// never loads it. If loading fails, that call reports it.
NGRAM_NPU_EXPORT void ngram_npu_defer_backend(const char* backend, int32_t device_type, const char* path);

// 1 if `op` has a loaded kernel for `device_type`, otherwise 0.
NGRAM_NPU_EXPORT int32_t ngram_npu_has_kernel(const char* op, int32_t device_type);
