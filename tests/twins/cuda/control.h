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

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// What the last launch that failed did wrong; empty where none has.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_violation();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_seed(uint64_t seed);
// For watched launches: see watch.h.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_forget_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_tensor(const void* owner, int64_t owner_bytes, const void* first,
                                                  int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                                  int32_t writable);
