// The NPU's entry points: plans carried out in the order of torch_npu's task queue. The only file that knows torch_npu.
//
// The closure runs later, on the queue's thread, so it owns all it needs. The tensors behind its addresses may be gone
// by then; their memory is not, since torch_npu hands freed memory only to work that is queued behind this.
#include <acl/acl_rt.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>
#include <torch_npu/csrc/framework/utils/OpPreparation.h>

#include "ascendc/plans.h"

// Made by CANN's compiler, one for each kernel of the chip; weak, because a chip may lack some, and so that this file
// links without CANN.
extern "C" {
#define NGRAM_NPU_DECLARE(name) \
  __attribute__((weak)) uint32_t aclrtlaunch_##name(uint32_t blocks, aclrtStream stream, NgramNpuLaunchArgs* args);
NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_DECLARE)
#undef NGRAM_NPU_DECLARE
}

namespace ngram_npu::ascendc {
namespace {

using StartKernel = uint32_t (*)(uint32_t blocks, aclrtStream stream, NgramNpuLaunchArgs* args);

StartKernel start(Kernel kernel) {
  static constexpr StartKernel kAll[] = {
#define NGRAM_NPU_ADDRESS(name) &aclrtlaunch_##name,
      NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_ADDRESS)
#undef NGRAM_NPU_ADDRESS
  };
  return kAll[static_cast<int32_t>(kernel)];
}

// The current device, asked once a thread; no vector cores where the runtime does not tell.
Machine current_machine() {
  constexpr auto kUbPerVectorCore = static_cast<aclrtDevAttr>(204);  // its name differs between releases
  constexpr int64_t kSmallestUbBytes = 192 * 1024;                   // of the chips; not every CANN tells
  thread_local int32_t known = -1;
  thread_local Machine machine{};
  int32_t device = 0;
  if (aclrtGetDevice(&device) != ACL_SUCCESS) return {};
  if (device == known) return machine;
  const auto ask = [device](aclrtDevAttr what, int64_t otherwise) {
    int64_t value = 0;
    const aclError error = aclrtGetDeviceInfo(static_cast<uint32_t>(device), what, &value);
    return error == ACL_SUCCESS && value > 0 ? value : otherwise;
  };
  machine = {ask(ACL_DEV_ATTR_VECTOR_CORE_NUM, 0), ask(kUbPerVectorCore, kSmallestUbBytes)};
  known = device;
  return machine;
}

template <class Params>
int32_t enqueue(const char* name, const Params& params) {
  LaunchPlan ready = plan(params, current_machine());
  if (ready.status != kOk) return ready.status;
  for (int32_t i = 0; i < ready.num_launches; ++i) {
    if (start(ready.launches[i].kernel) == nullptr) return kInvalidParams;
  }
  at::Tensor workspace;  // of the caching allocator, as all tensors: its memory outlives it as theirs does
  if (ready.workspace_bytes > 0) {
    const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(c10::DeviceType::PrivateUse1);
    workspace = at_npu::native::OpPreparation::apply_tensor_without_format({ready.workspace_bytes}, bytes);
    ready.set_workspace(workspace.data_ptr());
  }
  // Without waiting for the queue to empty: the launch goes through the queue, in its turn.
  aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand::RunOpApi(name, [ready, stream]() mutable -> int {
    for (int32_t i = 0; i < ready.num_launches; ++i) {
      const Launch& launch = ready.launches[i];
      const uint32_t error = start(launch.kernel)(launch.blocks, stream, &ready.args);
      if (error != 0) return static_cast<int>(error);
    }
    return 0;
  });
  return kOk;
}

}  // namespace
}  // namespace ngram_npu::ascendc

#define NGRAM_NPU_ENTRY_POINT(op, Params)                                                   \
  NGRAM_NPU_EXPORT int32_t ngram_npu_ascendc_##op(const ngram_npu::Params* params, void*) { \
    return ngram_npu::ascendc::enqueue("ngram_npu_" #op, *params);                          \
  }
NGRAM_NPU_ASCENDC_OPS(NGRAM_NPU_ENTRY_POINT)
