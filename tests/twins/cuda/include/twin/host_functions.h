// CUDA's functions for the host side; included by cuda_runtime.h. A launch is complete when it returns.
#pragma once

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
};

#define CUDART_VERSION 13000

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace twin {

// Runs `thread(context)` once for each thread of the grid.
cudaError_t launch(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context);

}  // namespace twin

cudaError_t cudaGetLastError();                     // and clears it
const char* cudaGetErrorString(cudaError_t error);  // of a failed launch: what the kernel did
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared);

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto call = [&, given = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
    std::apply(kernel, given);  // each thread has its own copy
  };
  return twin::launch(*config, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}
