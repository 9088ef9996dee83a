// Implements loaded_kernels.h: loads and launches the NPU kernels.
#include "ascendc/loaded_kernels.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

namespace ngram_npu::ascendc {
namespace {

constexpr const char* kKernelNames[] = {
#define NGRAM_NPU_NAME(name) #name,
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
};

thread_local std::string error_text;

// Returns the path of the kernels' binary, which is in the folder of this library.
std::string find_binary() {
  Dl_info library_info{};
  dladdr(reinterpret_cast<void*>(&get_error), &library_info);
  const std::string path = library_info.dli_fname;
  return path.substr(0, path.find_last_of('/') + 1) + "ngram_npu_kernels.o";
}

}  // namespace

void set_error(std::string text) { error_text = std::move(text); }
const char* get_error() { return error_text.c_str(); }

const LoadedKernels* LoadedKernels::get_or_load(int32_t device) {
  static std::mutex mutex;
  static std::map<int32_t, LoadedKernels> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto cached = cache.find(device);
  if (cached != cache.end()) return &cached->second;
  const std::string path = find_binary();
  aclrtBinHandle binary = nullptr;
  if (const aclError error = aclrtBinaryLoadFromFile(path.c_str(), nullptr, &binary); error != ACL_SUCCESS) {
    const char* chip = aclrtGetSocName();
    set_error("aclrtBinaryLoadFromFile returned " + std::to_string(error) + " for " + path +
              "; was it built for this " + (chip != nullptr ? chip : "chip") + "?");
    return nullptr;
  }
  LoadedKernels loaded;
  for (int32_t i = 0; i < kNumKernels; ++i) {
    const aclError error = aclrtBinaryGetFunction(binary, kKernelNames[i], &loaded.functions_[i]);
    if (error == ACL_SUCCESS) continue;
    set_error("aclrtBinaryGetFunction returned " + std::to_string(error) + " for " + kKernelNames[i] + " in " + path);
    return nullptr;
  }
  return &cache.emplace(device, loaded).first->second;
}

int32_t LoadedKernels::launch(const Launch& launch, aclrtStream stream, const NgramNpuLaunchArgs& args) const {
  // The word after the kernel's argument is the address for CANN's overflow check. It is null, because only debug
  // builds of kernels make this check, and it has no effect on these chips.
  struct {
    NgramNpuLaunchArgs kernel_args;
    uint64_t overflow_check_address;
  } launch_args{args, 0};
  return aclrtLaunchKernelWithHostArgs(functions_[static_cast<int32_t>(launch.kernel)], launch.blocks, stream, nullptr,
                                       &launch_args, sizeof(launch_args), nullptr, 0);
}

}  // namespace ngram_npu::ascendc
