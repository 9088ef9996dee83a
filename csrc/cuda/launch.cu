#include <atomic>

#include "cuda/launch.cuh"

namespace ngram_npu::cuda {
namespace {

thread_local const char* last_error = "";

}  // namespace

int32_t num_multiprocessors() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMaxDevices) return 1;
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

int32_t status_of(cudaError_t error) {
  last_error = error == cudaSuccess ? "" : cudaGetErrorString(error);
  if (error == cudaSuccess) return kOk;
  cudaGetLastError();  // the next launch starts clean
  return kLaunchFailed;
}

}  // namespace ngram_npu::cuda

const char* ngram_npu_cuda_error() { return ngram_npu::cuda::last_error; }

int32_t ngram_npu_cuda_runtime_version() { return CUDART_VERSION; }
