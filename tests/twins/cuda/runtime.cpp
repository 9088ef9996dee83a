// The functions of CUDA's runtime that the host calls, and the settings and records of the model.
#include <algorithm>
#include <cstdlib>

#include "grid.h"

namespace twin {
namespace {

cudaError_t last_error = cudaSuccess;
std::string last_violation;
std::vector<cudaStream_t> streams;
int64_t launches_to_fail = 0;
char *first_buffer = nullptr, *second_buffer = nullptr;
int64_t buffer_bytes = 0;

uint64_t first_seed() {
  const char* seed_text = std::getenv("NGRAM_NPU_TWIN_SEED");
  return seed_text != nullptr ? std::strtoull(seed_text, nullptr, 10) << 32 : 1;
}
uint64_t seed = first_seed();

}  // namespace

SimulationOptions& options() {
#if defined(NGRAM_TWIN_HOOKS)
  static SimulationOptions launch_options = kHooks;
#elif defined(NGRAM_TWIN_RESIDENT)
  static SimulationOptions launch_options = kResident;
#else
  static SimulationOptions launch_options = kFast;
#endif
  return launch_options;
}

cudaError_t set_error(cudaError_t error, const std::string& what) {
  last_error = error;
  last_violation = what;
  return error;
}

void set_seed(uint64_t value) { seed = value; }
uint64_t next_seed() { return seed++; }

BlockOverlapCounts& block_overlap_counts() {
  static BlockOverlapCounts counts;
  return counts;
}

bool take_requested_failure() { return launches_to_fail > 0 && launches_to_fail-- > 0; }

void swap_registered_buffers() { std::swap_ranges(first_buffer, first_buffer + buffer_bytes, second_buffer); }

void record_stream(cudaStream_t stream) { streams.push_back(stream); }

}  // namespace twin

const char* ngram_npu_cuda_twin_violation() { return twin::last_violation.c_str(); }
void ngram_npu_cuda_twin_seed(uint64_t seed) { twin::set_seed(seed); }
void ngram_npu_cuda_twin_fail_launches(int64_t count) { twin::launches_to_fail = count; }

void ngram_npu_cuda_twin_swap_at_barriers(void* first, void* second, int64_t bytes) {
  twin::first_buffer = static_cast<char*>(first);
  twin::second_buffer = static_cast<char*>(second);
  twin::buffer_bytes = bytes;
}

void ngram_npu_cuda_twin_block_overlaps(int64_t* launches_sharing_a_word, int64_t* launches_with_overlap) {
  *launches_sharing_a_word = twin::block_overlap_counts().launches_sharing_a_word;
  *launches_with_overlap = twin::block_overlap_counts().launches_with_overlap;
}

int64_t ngram_npu_cuda_twin_streams(void** streams, int64_t capacity) {
  const auto count = static_cast<int64_t>(twin::streams.size());
  for (int64_t i = 0; i < count && i < capacity; ++i) streams[i] = twin::streams[static_cast<size_t>(i)];
  twin::streams.clear();
  return count;
}

void ngram_npu_cuda_twin_allow_races(int32_t allowed) { twin::races_are_allowed() = allowed != 0; }
void ngram_npu_cuda_twin_forget_tensors() { twin::regions().clear(); }

void ngram_npu_cuda_twin_register_tensor(const void* owner, int64_t owner_bytes, const void* first, int64_t rows,
                                         int64_t row_bytes, int64_t stride_bytes, int32_t writable) {
  const auto number = [](int64_t value) { return static_cast<uintptr_t>(value); };
  twin::regions().push_back({reinterpret_cast<uintptr_t>(owner), number(owner_bytes),
                             reinterpret_cast<uintptr_t>(first), number(rows), number(row_bytes), number(stride_bytes),
                             writable != 0});
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = twin::last_error;
  twin::last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : twin::last_violation.c_str();
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return twin::set_error(cudaErrorInvalidValue, "unknown attribute");
  *value = 4;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
