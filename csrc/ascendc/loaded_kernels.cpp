// Implements loaded_kernels.h: loads and launches the NPU kernels.
#include "ascendc/loaded_kernels.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

namespace ngram_npu::ascendc {
namespace {

constexpr const char* kKernelNames[] = {
#define NGRAM_NPU_NAME(name) #name,
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
};

thread_local std::string error_text;

// Returns the path of a file in the folder of this library.
std::string make_path_next_to_this_library(const char* file) {
  Dl_info library_info{};
  dladdr(reinterpret_cast<void*>(&load_error), &library_info);
  const std::string path = library_info.dli_fname;
  return path.substr(0, path.find_last_of('/') + 1) + file;
}

// Returns a function of CANN's runtime, or null if this release does not have it. The functions are not linked, because
// not every CANN release has them.
template <class Function>
Function find_runtime_function(const char* name) {
  void* runtime = dlopen("libascendcl.so", RTLD_LAZY | RTLD_NOLOAD);
  return runtime != nullptr ? reinterpret_cast<Function>(dlsym(runtime, name)) : nullptr;
}

}  // namespace

const char* load_error() { return error_text.c_str(); }

// Loads the kernels' binary with CANN's "kernel loading and execution" interface.
bool LoadedKernels::load_binary() {
  using LoadFromFile = int32_t (*)(const char* path, void* options, void** binary);
  using GetFunction = int32_t (*)(void* binary, const char* name, void** function);
  const auto load = find_runtime_function<LoadFromFile>("aclrtBinaryLoadFromFile");
  const auto get = find_runtime_function<GetFunction>("aclrtBinaryGetFunction");
  const auto launch = find_runtime_function<LaunchFromHost>("aclrtLaunchKernelWithHostArgs");
  void* binary = nullptr;
  if (load == nullptr || get == nullptr || launch == nullptr) return false;
  if (load(make_path_next_to_this_library("ngram_npu_kernels.o").c_str(), nullptr, &binary) != 0) return false;
  for (int32_t i = 0; i < kNumKernels; ++i) {
    if (get(binary, kKernelNames[i], &entries_[i]) != 0) return false;
  }
  launch_ = launch;
  return true;
}

// Loads the launch stubs that CANN generates; opening their library loads the kernels. Each launch through a stub
// allocates and frees eight bytes of device memory.
bool LoadedKernels::load_stubs() {
  void* library = dlopen(make_path_next_to_this_library("libngram_npu_ascendc.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  for (int32_t i = 0; i < kNumKernels && library != nullptr; ++i) {
    entries_[i] = dlsym(library, (std::string("aclrtlaunch_") + kKernelNames[i]).c_str());
    if (entries_[i] == nullptr) library = nullptr;
  }
  if (library == nullptr) error_text = dlerror();
  return library != nullptr;
}

const LoadedKernels* LoadedKernels::get_or_load(int32_t device) {
  static std::mutex mutex;
  static std::map<int32_t, LoadedKernels> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto cached = cache.find(device);
  if (cached != cache.end()) return &cached->second;
  LoadedKernels loaded;
  if (!loaded.load_binary() && !loaded.load_stubs()) return nullptr;
  return &cache.emplace(device, loaded).first->second;
}

int32_t LoadedKernels::launch(const Launch& launch, void* stream, const NgramNpuLaunchArgs& args) const {
  // The word after the kernel's argument is the address for CANN's overflow check. It is null, because only debug
  // builds of kernels make this check, and it has no effect on these chips.
  struct {
    NgramNpuLaunchArgs kernel_args;
    uint64_t overflow_check_address;
  } launch_args{args, 0};
  void* entry = entries_[static_cast<int32_t>(launch.kernel)];
  if (launch_ != nullptr)
    return launch_(entry, launch.blocks, stream, nullptr, &launch_args, sizeof(launch_args), nullptr, 0);
  using Stub = uint32_t (*)(uint32_t blocks, void* stream, NgramNpuLaunchArgs* args);
  return static_cast<int32_t>(reinterpret_cast<Stub>(entry)(launch.blocks, stream, &launch_args.kernel_args));
}

}  // namespace ngram_npu::ascendc
