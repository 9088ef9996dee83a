// The NPU's C entry points: load the kernels, and launch them as planned, in the order of torch_npu's task queue. Only
// this file uses torch_npu.
//
// The closure passed to RunOpApi runs later, on the thread of the task queue, so it owns its data. The tensors to which
// its pointers refer may be freed by then, but their memory is still valid: torch_npu reuses freed memory only for work
// that is queued later.
#include <acl/acl_rt.h>
#include <dlfcn.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include <map>
#include <mutex>
#include <string>

#include "ascendc/plans.h"

namespace ngram_npu::ascendc {
namespace {

constexpr const char* kKernelNames[] = {
#define NGRAM_NPU_NAME(name) #name,
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
};
constexpr int32_t kNumKernels = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

// Why the last call in this thread failed.
thread_local std::string error_text;

struct Device {
  DeviceProperties properties{};
  aclrtFuncHandle kernels[kNumKernels] = {};  // they exist until the process ends

  // Returns 0 or the runtime's error. Allocates no device memory.
  int32_t launch(const Launch& launch, aclrtStream stream, const NgramNpuLaunchArgs& args) const {
    // The word after the kernel's argument is the address for CANN's overflow check. It is null, because only debug
    // builds of kernels make this check, and it has no effect on these chips.
    struct {
      NgramNpuLaunchArgs kernel_args;
      uint64_t overflow_check_address;
    } launch_args{args, 0};
    return aclrtLaunchKernelWithHostArgs(kernels[static_cast<int32_t>(launch.kernel)], launch.blocks, stream, nullptr,
                                         &launch_args, sizeof(launch_args), nullptr, 0);
  }
};

// Reads the properties of the NPU with this number, the thread's current one. Returns whether it succeeded; if not,
// sets error_text.
bool read_properties(int32_t number, DeviceProperties* properties) {
  constexpr auto kUbPerVectorCore = static_cast<aclrtDevAttr>(204);  // the enumerator's name differs between releases
  // Smallest value of all supported chips; not every CANN release reports the size.
  constexpr int64_t kSmallestUbBytes = 192 * 1024;
  const auto device_id = static_cast<uint32_t>(number);
  const aclError error = aclrtGetDeviceInfo(device_id, ACL_DEV_ATTR_VECTOR_CORE_NUM, &properties->vector_cores);
  if (error != ACL_SUCCESS || properties->vector_cores < 1) {
    error_text = "the number of vector cores of NPU " + std::to_string(number) +
                 " is unknown: aclrtGetDeviceInfo(ACL_DEV_ATTR_VECTOR_CORE_NUM) returned " + std::to_string(error) +
                 " and " + std::to_string(properties->vector_cores) + " cores";
    return false;
  }
  int64_t& ub_bytes = properties->ub_bytes;
  if (aclrtGetDeviceInfo(device_id, kUbPerVectorCore, &ub_bytes) != ACL_SUCCESS || ub_bytes < 1)
    ub_bytes = kSmallestUbBytes;
  return true;
}

// Loads the kernels of the current device from the binary in this library's folder. Returns whether it succeeded; if
// not, sets error_text.
bool load_kernels(aclrtFuncHandle (&kernels)[kNumKernels]) {
  Dl_info library_info{};
  dladdr(reinterpret_cast<void*>(&load_kernels), &library_info);
  const std::string library = library_info.dli_fname;
  const std::string path = library.substr(0, library.find_last_of('/') + 1) + "ngram_npu_kernels.o";
  aclrtBinHandle binary = nullptr;
  if (const aclError error = aclrtBinaryLoadFromFile(path.c_str(), nullptr, &binary); error != ACL_SUCCESS) {
    const char* chip = aclrtGetSocName();
    error_text = "aclrtBinaryLoadFromFile returned " + std::to_string(error) + " for " + path +
                 "; was it built for this " + (chip != nullptr ? chip : "chip") + "?";
    return false;
  }
  for (int32_t i = 0; i < kNumKernels; ++i) {
    const aclError error = aclrtBinaryGetFunction(binary, kKernelNames[i], &kernels[i]);
    if (error == ACL_SUCCESS) continue;
    error_text = "aclrtBinaryGetFunction returned " + std::to_string(error) + " for " + kKernelNames[i] + " in " + path;
    return false;
  }
  return true;
}

// Returns the thread's current device. The first call for a device loads its kernels, because loading initialises the
// device; until then, the process can still choose its visible devices. On failure, sets error_text and returns null.
const Device* get_current_device() {
  static std::mutex mutex;
  static std::map<int32_t, Device> devices;
  int32_t number = 0;
  if (const aclError error = aclrtGetDevice(&number); error != ACL_SUCCESS) {
    error_text = "the NPU of this thread is unknown: aclrtGetDevice returned " + std::to_string(error);
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = devices.find(number);
  if (known != devices.end()) return &known->second;
  Device device;
  if (!read_properties(number, &device.properties) || !load_kernels(device.kernels)) return nullptr;
  return &devices.emplace(number, device).first->second;
}

template <class Params>
int32_t enqueue_launches(const char* name, const Params& params) {
  // This call must come first, because in a new thread it sets the device. The argument is false so that the call does
  // not wait until the queue is empty; the launch goes through the queue, too.
  aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
  const Device* device = get_current_device();
  if (device == nullptr) return kLaunchFailed;
  LaunchPlan launch_plan = plan(params, device->properties);
  if (launch_plan.status != kOk) {
    error_text = "the arguments need more than the " + std::to_string(device->properties.ub_bytes) +
                 " bytes of unified buffer per core";
    return kLaunchFailed;
  }
  at::Tensor workspace;  // the caching allocator keeps the memory valid until the queued launches have run
  if (launch_plan.workspace_bytes > 0) {
    const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(c10::DeviceType::PrivateUse1);
    workspace = at_npu::native::OpPreparation::apply_tensor_without_format({launch_plan.workspace_bytes}, bytes);
    launch_plan.set_workspace(workspace.data_ptr());
  }
  at_npu::native::OpCommand::RunOpApi(name, [device, launch_plan, stream]() -> int {
    for (int32_t i = 0; i < launch_plan.num_launches; ++i) {
      const int32_t error = device->launch(launch_plan.launches[i], stream, launch_plan.args);
      if (error != 0) return error;
    }
    return 0;
  });
  return kOk;
}

}  // namespace
}  // namespace ngram_npu::ascendc

#define NGRAM_NPU_ENTRY_POINT(op, Params)                                                   \
  NGRAM_NPU_EXPORT int32_t ngram_npu_ascendc_##op(const ngram_npu::Params* params, void*) { \
    return ngram_npu::ascendc::enqueue_launches("ngram_npu_" #op, *params);                 \
  }
NGRAM_NPU_ASCENDC_OPS(NGRAM_NPU_ENTRY_POINT)

NGRAM_NPU_EXPORT const char* ngram_npu_ascendc_error() { return ngram_npu::ascendc::error_text.c_str(); }
