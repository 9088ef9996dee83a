// Helpers for tests of the model: run_kernel() launches a kernel, and the expectations below repeat launches, because
// each launch runs the threads in another order.
#pragma once

#include <gtest/gtest.h>

#include "grid.h"

namespace twin {

struct LaunchShape {
  dim3 grid{1};
  dim3 block{64};
  size_t dynamic_shared_bytes = 0;
};

template <class... Parameters, class... Arguments>
cudaError_t run_kernel(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.dynamic_shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Expects that every launch of the kernel fails with an error that contains `message`.
template <class... Arguments>
void expect_error(const std::string& message, const LaunchShape& shape, Arguments... arguments) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(run_kernel(shape, arguments...), cudaErrorLaunchFailure);
    ASSERT_NE(std::string(ngram_npu_cuda_twin_last_error_text()).find(message), std::string::npos)
        << ngram_npu_cuda_twin_last_error_text();
  }
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

template <class... Arguments>
void expect_success(const LaunchShape& shape, Arguments... arguments) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(run_kernel(shape, arguments...), cudaSuccess) << ngram_npu_cuda_twin_last_error_text();
  }
}

// Expects that a kernel's result is wrong in some order. `is_result_wrong` launches the kernel and checks the result.
template <class Function>
void expect_wrong_result_in_some_order(const Function& is_result_wrong) {
  int num_wrong = 0;
  for (int i = 0; i < 200; ++i) num_wrong += is_result_wrong();
  EXPECT_GT(num_wrong, 0);
}

}  // namespace twin
