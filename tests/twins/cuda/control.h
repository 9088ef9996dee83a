// The tests' control of the model, and its reports to them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "grid.h"

namespace twin {

// Sets how kernels are run; the default is the mode that the library was built for.
Options& options();
// Sets the seed of the following launches' thread order. The first seed is NGRAM_NPU_TWIN_SEED.
void set_seed(uint64_t seed);
uint64_t next_seed();  // for the launch that begins
// Stores a launch's error until it is read; returns it.
cudaError_t set_error(cudaError_t error, const std::string& what);
// Whether a launch was told to fail (ngram_npu_cuda_twin_fail_launches).
bool next_launch_fails();
// Exchanges what a test told to (ngram_npu_cuda_twin_exchange_at_barriers).
void exchange();
// Notes which stream a launch was for.
void note_stream(cudaStream_t stream);

}  // namespace twin

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// What the last failed launch did wrong; empty if none failed.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_violation();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_seed(uint64_t seed);
// So many launches from now on fail before their kernel begins.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_fail_launches(int64_t count);
// At about half of the barriers from now on the two memories are exchanged, as if another stream wrote them: the block
// of the barrier has the new values behind it, all its threads the same. Without bytes: no longer.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_exchange_at_barriers(void* one, void* other, int64_t bytes);
// Totals since the library was loaded: see Meetings.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_meetings(int64_t* launches, int64_t* met);
// Writes the streams of the launches since the last call of this, up to the given room. Returns their number.
NGRAM_TWIN_EXPORT int64_t ngram_npu_cuda_twin_streams(void** streams, int64_t room);
// For watched launches: see watch.h.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_forget_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_tensor(const void* owner, int64_t owner_bytes, const void* first,
                                                  int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                                  int32_t writable);
