// For tests: a launch in one line, and the expectations on a wrong kernel.
#pragma once

#include <gtest/gtest.h>

#include "grid.h"

namespace twin {

struct Launch {
  dim3 grid{1};
  dim3 block{64};
};

template <class... P, class... A>
cudaError_t run(const Launch& shape, void (*kernel)(P...), A... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The kernel breaks a rule in every order, and the message names it.
template <class... A>
void expect_caught(const std::string& message, const Launch& shape, A... arguments) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(run(shape, arguments...), cudaErrorLaunchFailure);
    ASSERT_NE(std::string(ngram_npu_cuda_twin_violation()).find(message), std::string::npos)
        << ngram_npu_cuda_twin_violation();
  }
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

template <class... A>
void expect_right(const Launch& shape, A... arguments) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(run(shape, arguments...), cudaSuccess) << ngram_npu_cuda_twin_violation();
  }
}

// The kernel's result is wrong in some order; `wrong` runs it and checks.
template <class Wrong>
void expect_wrong_in_some_order(const Wrong& wrong) {
  int count = 0;
  for (int i = 0; i < 200; ++i) count += wrong();
  EXPECT_GT(count, 0);
}

}  // namespace twin
