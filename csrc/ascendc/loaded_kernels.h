// The kernels loaded on a device, and their launch. They are loaded when first used: loading initialises the device,
// and a process may still want to choose its visible devices.
#pragma once

#include <cstdint>

#include "ascendc/launch_plan.h"

namespace ngram_npu::ascendc {

constexpr int32_t kNumKernels = 0
#define NGRAM_NPU_ONE(name) +1
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_ONE)
#undef NGRAM_NPU_ONE
    ;

class LoadedKernels {
 public:
  // Returns the kernels of the current device, number `device`; the first call loads them. If that fails, returns null,
  // and load_error() returns the reason for the calling thread. Valid until the process ends.
  static const LoadedKernels* for_device(int32_t device);

  // Launches a kernel. Returns 0 or the runtime's error. Allocates nothing if the runtime takes arguments from host
  // memory.
  int32_t launch(const Launch& launch, void* stream, const NgramNpuLaunchArgs& args) const;

 private:
  using LaunchFromHost = int32_t (*)(void* function, uint32_t blocks, void* stream, void* config, void* args,
                                     size_t bytes, void* placeholders, size_t num_placeholders);
  bool load_binary();
  bool load_stubs();

  LaunchFromHost launch_ = nullptr;  // null: the entries are launch stubs
  void* entries_[kNumKernels] = {};  // device functions, or host functions (launch stubs)
};

const char* load_error();

}  // namespace ngram_npu::ascendc
