// Loads the kernels of a device and launches them. The kernels are loaded at their first use, because loading
// initialises the device; until then, the process can still choose its visible devices.
#pragma once

#include <acl/acl_rt.h>

#include <cstdint>
#include <string>

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
  // fails, sets the thread's error and returns null. The kernels exist until the process ends.
  static const LoadedKernels* get_or_load(int32_t device);

  // Launches a kernel. Returns 0 or the runtime's error. Allocates no device memory.
  int32_t launch(const Launch& launch, aclrtStream stream, const NgramNpuLaunchArgs& args) const;

 private:
  aclrtFuncHandle functions_[kNumKernels] = {};
};

// The reason why the last call in this thread failed.
void set_error(std::string text);
const char* get_error();

}  // namespace ngram_npu::ascendc
