// The NPU's C entry points, which execute plans in the order of torch_npu's task queue. Only this file uses torch_npu.
//
// The closure passed to RunOpApi runs later, on the thread of the task queue, so it owns its data. The tensors to which
// its pointers refer may be freed by then, but their memory is still valid: torch_npu reuses freed memory only for work
// that is queued later.
#include <acl/acl_rt.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include "ascendc/loaded_kernels.h"
#include "ascendc/plans.h"

namespace ngram_npu::ascendc {
namespace {

struct CurrentDevice {
  int32_t number;
  DeviceProperties properties;
  const LoadedKernels* kernels;
};

// Returns the properties and kernels of the current device, cached per thread. On failure, sets the thread's error and
// returns null.
const CurrentDevice* get_current_device() {
  constexpr auto kUbPerVectorCore = static_cast<aclrtDevAttr>(204);  // the enumerator's name differs between releases
  // Smallest value of all supported chips; not every CANN release reports the size.
  constexpr int64_t kSmallestUbBytes = 192 * 1024;
  thread_local CurrentDevice cached_device{-1, {}, nullptr};
  int32_t number = 0;
  if (const aclError error = aclrtGetDevice(&number); error != ACL_SUCCESS) {
    set_error("the NPU of this thread is unknown: aclrtGetDevice returned " + std::to_string(error));
    return nullptr;
  }
  if (number == cached_device.number) return &cached_device;
  const auto device_id = static_cast<uint32_t>(number);
  DeviceProperties properties{};
  const aclError error = aclrtGetDeviceInfo(device_id, ACL_DEV_ATTR_VECTOR_CORE_NUM, &properties.vector_cores);
  if (error != ACL_SUCCESS || properties.vector_cores < 1) {
    set_error("the number of vector cores of NPU " + std::to_string(number) +
              " is unknown: aclrtGetDeviceInfo(ACL_DEV_ATTR_VECTOR_CORE_NUM) returned " + std::to_string(error) +
              " and " + std::to_string(properties.vector_cores) + " cores");
    return nullptr;
  }
  if (aclrtGetDeviceInfo(device_id, kUbPerVectorCore, &properties.ub_bytes) != ACL_SUCCESS || properties.ub_bytes < 1)
    properties.ub_bytes = kSmallestUbBytes;
  const LoadedKernels* kernels = LoadedKernels::get_or_load(number);
  if (kernels == nullptr) return nullptr;
  cached_device = {number, properties, kernels};
  return &cached_device;
}

template <class Params>
int32_t enqueue_launches(const char* name, const Params& params) {
  // This call must come first, because in a new thread it sets the device. The argument is false so that the call does
  // not wait until the queue is empty; the launch goes through the queue, too.
  aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
  const CurrentDevice* device = get_current_device();
  if (device == nullptr) return kLaunchFailed;
  LaunchPlan launch_plan = plan(params, device->properties);
  if (launch_plan.status != kOk) {
    set_error("the arguments need more than the " + std::to_string(device->properties.ub_bytes) +
              " bytes of unified buffer per core");
    return kLaunchFailed;
  }
  at::Tensor workspace;  // the caching allocator keeps the memory valid until the queued launches have run
  if (launch_plan.workspace_bytes > 0) {
    const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(c10::DeviceType::PrivateUse1);
    workspace = at_npu::native::OpPreparation::apply_tensor_without_format({launch_plan.workspace_bytes}, bytes);
    launch_plan.set_workspace(workspace.data_ptr());
  }
  at_npu::native::OpCommand::RunOpApi(name, [kernels = device->kernels, launch_plan, stream]() -> int {
    for (int32_t i = 0; i < launch_plan.num_launches; ++i) {
      const int32_t error = kernels->launch(launch_plan.launches[i], stream, launch_plan.args);
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

NGRAM_NPU_EXPORT const char* ngram_npu_ascendc_error() { return ngram_npu::ascendc::get_error(); }
