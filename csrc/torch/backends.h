// From an operator and a device to the backend's kernel.
//
// Backend libraries are torch-free and loaded at run time (python/ngram_npu/_library.py); each exports
// `ngram_npu_<backend>_<op>`. Loading one gives a device the kernels it has. A host twin is a backend library like any
// other, so tests load it in a device's place. Optional beside them:
//   int64_t ngram_npu_<backend>_<op>_workspace(const <Op>Params*)   words of workspace this call needs, 0: none
//   const char* ngram_npu_<backend>_error()                        why the calling thread's last launch failed
#pragma once

#include "host/arguments.h"

namespace ngram_npu::torch_side {

constexpr int32_t kNumDeviceTypes = 32;

using Kernel = int32_t (*)(const void* params, void* stream);
using WorkspaceWords = int64_t (*)(const void* params);
using LastError = const char* (*)();

// One static object an operator; its constructor enters it into the list of all.
class Operator {
 public:
  explicit Operator(const char* name);

  const char* name() const { return name_; }
  // Runs the device's kernel: on the CPU at once, elsewhere on the current stream of that device.
  void call(const host::Device& device, const void* params) const;
  // Words of workspace that the device's kernel needs for a call; 0 on the CPU.
  int64_t workspace_words(const host::Device& device, const void* params) const;

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

}  // namespace ngram_npu::torch_side

// torch's number for "cpu", "cuda" or "npu"; -1 for another name.
NGRAM_NPU_EXPORT int32_t ngram_npu_device_type(const char* name);

// Loads the library at `path` and gives its kernels to `device_type`. Returns how many operators it serves, or -1 with
// the loader's reason in `error`. Not to be called while operators run.
NGRAM_NPU_EXPORT int32_t ngram_npu_load_backend(const char* backend, int32_t device_type, const char* path, char* error,
                                                int64_t error_bytes);

// Has the library at `path` loaded by the first call of an operator on `device_type`, not before: what loading starts
// may be unwanted in a process that never makes one. That call reports a library that does not load.
NGRAM_NPU_EXPORT void ngram_npu_defer_backend(const char* backend, int32_t device_type, const char* path);

// 1 where `op` has a kernel for `device_type` that is loaded.
NGRAM_NPU_EXPORT int32_t ngram_npu_has_kernel(const char* op, int32_t device_type);
