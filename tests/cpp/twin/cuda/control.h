// What the tests say to the model and hear from it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "grid.h"

namespace twin {

// How kernels are run from now on; at first as the library was built for.
Options& options();
// Launches that follow differ in order from those under another seed.
void set_seed(uint64_t seed);
// Keeps the error of a launch until it is asked for; returns it.
cudaError_t set_error(cudaError_t error, const std::string& what);

}  // namespace twin

// What the last launch that failed did wrong; empty where none has.
extern "C" __attribute__((visibility("default"))) const char* ngram_npu_twin_cuda_violation();
extern "C" __attribute__((visibility("default"))) void ngram_npu_twin_cuda_seed(uint64_t seed);
