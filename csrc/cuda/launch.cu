// Functions of launch.cuh that are not inline: queries and errors of the CUDA runtime.
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

static thread_local const char* last_error = "";

int32_t resident_blocks(const void* kernel, int32_t threads, size_t shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int32_t, size_t>, int32_t> cached_counts;
  int device = 0, num_multiprocessors = 0, blocks_per_multiprocessor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  const std::lock_guard<std::mutex> lock(mutex);
  int32_t& count = cached_counts[{device, kernel, threads, shared_bytes}];
  if (count == 0) {
    if (allow_shared_bytes(kernel, shared_bytes) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_multiprocessor, kernel, threads, shared_bytes) !=
        cudaSuccess)
      return 1;
    count = larger(1, num_multiprocessors * blocks_per_multiprocessor);
  }
  return count;
}

int32_t status_of(cudaError_t error) {
  last_error = error == cudaSuccess ? "" : cudaGetErrorString(error);
  if (error == cudaSuccess) return kOk;
  cudaGetLastError();  // clears the error for the next launch
  return kLaunchFailed;
}

}  // namespace ngram_npu::cuda

const char* ngram_npu_cuda_error() { return ngram_npu::cuda::last_error; }

int32_t ngram_npu_cuda_runtime_version() { return CUDART_VERSION; }
