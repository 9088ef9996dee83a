// The kernels as they are on a device, and how they are started there. Nothing of them is loaded before it is asked
// for: that talks to the device, and a process may still choose which it sees.
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
  // Those of the current device, whose number is `device`: loaded by the first call for it. Null where they cannot be
  // loaded, and then load_error() says why to the calling thread. Lives as long as the process.
  static const LoadedKernels* on(int32_t device);

  // 0, or the runtime's error. Allocates nothing where the runtime takes the arguments from host memory.
  int32_t start(const Launch& launch, void* stream, const NgramNpuLaunchArgs& args) const;

 private:
  using LaunchFromHost = int32_t (*)(void* function, uint32_t blocks, void* stream, void* config, void* args,
                                     size_t bytes, void* placeholders, size_t num_placeholders);
  bool load_binary();
  bool load_stubs();

  LaunchFromHost launch_ = nullptr;  // null: the entries are launch stubs
  void* entries_[kNumKernels] = {};  // functions of the device, or of the host
};

const char* load_error();

}  // namespace ngram_npu::ascendc
