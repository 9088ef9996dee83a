// What the tests say to the model and hear from it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "grid.h"

namespace twin {

// How kernels are run from now on; at first as the library was built for.
Options& options();
// Launches that follow differ in order from those under another seed. The first is NGRAM_NPU_TWIN_SEED.
void set_seed(uint64_t seed);
uint64_t next_seed();  // of the launch that begins
// Keeps the error of a launch until it is asked for; returns it.
cudaError_t set_error(cudaError_t error, const std::string& what);
// Notes which stream a launch was for.
void note_stream(cudaStream_t stream);

}  // namespace twin

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// What the last launch that failed did wrong; empty where none has.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_violation();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_seed(uint64_t seed);
// Adds up since the library was loaded: see Meetings.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_meetings(int64_t* launches, int64_t* met);
// The streams of the launches since the last call of this: as many as there is room for. Returns how many there were.
NGRAM_TWIN_EXPORT int64_t ngram_npu_cuda_twin_streams(void** streams, int64_t room);
// For watched launches: see watch.h.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_forget_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_tensor(const void* owner, int64_t owner_bytes, const void* first,
                                                  int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                                  int32_t writable);
