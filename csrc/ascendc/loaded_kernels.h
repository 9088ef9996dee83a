// Loads the kernels of a device and launches them. The kernels are loaded at their first use, because loading
// initialises the device; until then, the process can still choose its visible devices.
#pragma once

#include <cstdint>

#include "ascendc/launch_plan.h"

namespace ngram_npu::ascendc {

constexpr int32_t kNumKernels = 0
#define NGRAM_NPU_COUNT(name) +1
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_COUNT)
#undef NGRAM_NPU_COUNT
    ;

class LoadedKernels {
 public:
  // Returns the kernels of the current device; `device` is its number. The first call loads the kernels. If loading
  // fails, the result is null, and load_error() returns the reason in the calling thread. The kernels exist until the
  // process ends.
  static const LoadedKernels* get_or_load(int32_t device);

  // Launches a kernel. Returns 0 or the runtime's error. Allocates no device memory if this CANN release has
  // aclrtLaunchKernelWithHostArgs.
  int32_t launch(const Launch& launch, void* stream, const NgramNpuLaunchArgs& args) const;

 private:
  using LaunchFromHost = int32_t (*)(void* function, uint32_t blocks, void* stream, void* config, void* args,
                                     size_t bytes, void* placeholders, size_t num_placeholders);
  bool load_binary();
  bool load_stubs();

  LaunchFromHost launch_ = nullptr;  // aclrtLaunchKernelWithHostArgs; null if the entries are launch stubs
  void* entries_[kNumKernels] = {};  // device functions, or host functions (launch stubs)
};

// Returns the reason why loading failed in the calling thread.
const char* load_error();

}  // namespace ngram_npu::ascendc
