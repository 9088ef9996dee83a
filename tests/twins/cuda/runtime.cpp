// The functions of CUDA's runtime that host code calls, and the interface for the tests (grid.h).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "grid.h"

namespace twin {
namespace {

cudaError_t last_error = cudaSuccess;
std::string last_error_text;
cudaStream_t caller_stream = nullptr;
std::map<const void*, size_t> allowed_shared_bytes;  // by kernel, if it differs from the default
int64_t num_launches_to_fail = 0;
char *first_buffer = nullptr, *second_buffer = nullptr;
int64_t buffer_bytes = 0;
std::vector<std::function<cudaError_t()>> graph;
bool is_capturing = false;

uint64_t read_first_seed() {
  const char* seed_text = std::getenv("NGRAM_NPU_TWIN_SEED");
  return seed_text != nullptr ? std::strtoull(seed_text, nullptr, 10) << 32 : 1;
}
uint64_t seed = read_first_seed();

}  // namespace

SimulationOptions& options() {
#if defined(NGRAM_TWIN_HOOKS)
  static SimulationOptions launch_options = kCheckedAccessesOptions;
#elif defined(NGRAM_TWIN_RESIDENT)
  static SimulationOptions launch_options = kInterleavedOptions;
#else
  static SimulationOptions launch_options = kSequentialOptions;
#endif
  return launch_options;
}

cudaError_t set_error(cudaError_t error, const std::string& text) {
  last_error = error;
  last_error_text = text;
  return error;
}

size_t max_dynamic_shared_bytes(const void* kernel) {
  const auto entry = allowed_shared_bytes.find(kernel);
  return entry == allowed_shared_bytes.end() ? size_t{47} << 10 /* 1 KiB for static shared memory */ : entry->second;
}

void set_seed(uint64_t value) { seed = value; }
uint64_t take_next_seed() { return seed++; }

cudaError_t check_launch(cudaStream_t stream) {
  if (stream != caller_stream) return set_error(cudaErrorInvalidValue, "launched on another stream than the caller's");
  if (num_launches_to_fail == 0) return cudaSuccess;
  --num_launches_to_fail;
  return set_error(cudaErrorLaunchOutOfResources, "too many resources requested for launch");
}

void swap_registered_buffers() { std::swap_ranges(first_buffer, first_buffer + buffer_bytes, second_buffer); }

cudaError_t run_or_capture(std::function<cudaError_t()> run) {
  if (!is_capturing) return run();
  graph.push_back(std::move(run));
  return cudaSuccess;
}

}  // namespace twin

const char* ngram_npu_cuda_twin_last_error_text() { return twin::last_error_text.c_str(); }
void ngram_npu_cuda_twin_set_seed(uint64_t seed) { twin::set_seed(seed); }
void ngram_npu_cuda_twin_fail_launches(int64_t count) { twin::num_launches_to_fail = count; }

void ngram_npu_cuda_twin_begin_capture() {
  twin::graph.clear();
  twin::is_capturing = true;
}

int64_t ngram_npu_cuda_twin_end_capture() {
  twin::is_capturing = false;
  return static_cast<int64_t>(twin::graph.size());
}

int32_t ngram_npu_cuda_twin_replay() {
  for (auto& run : twin::graph) {
    if (const cudaError_t error = run(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

void ngram_npu_cuda_twin_swap_at_barriers(void* first, void* second, int64_t bytes) {
  twin::first_buffer = static_cast<char*>(first);
  twin::second_buffer = static_cast<char*>(second);
  twin::buffer_bytes = bytes;
}

void ngram_npu_cuda_twin_set_stream(void* stream) { twin::caller_stream = static_cast<cudaStream_t>(stream); }
void ngram_npu_cuda_twin_allow_races(int32_t allowed) { twin::races_are_allowed() = allowed != 0; }
void ngram_npu_cuda_twin_clear_tensors() { twin::registered_regions().clear(); }

void ngram_npu_cuda_twin_register_tensor(const void* buffer, int64_t buffer_bytes, const void* first_row,
                                         int64_t num_rows, int64_t row_bytes, int64_t stride_bytes, int32_t writable) {
  const auto convert = [](int64_t value) { return static_cast<uintptr_t>(value); };
  twin::registered_regions().push_back({reinterpret_cast<uintptr_t>(buffer), convert(buffer_bytes),
                                        reinterpret_cast<uintptr_t>(first_row), convert(num_rows), convert(row_bytes),
                                        convert(stride_bytes), writable != 0});
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = twin::last_error;
  twin::last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : twin::last_error_text.c_str();
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

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  constexpr int kMaxBytes = 99 << 10;  // of the GPUs with the smallest shared memory
  if (value > kMaxBytes) return twin::set_error(cudaErrorInvalidValue, "invalid argument");
  twin::allowed_shared_bytes[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return twin::run_or_capture([=] {
    const cudaError_t error = twin::check_launch(stream);
    if (error == cudaSuccess) std::memset(memory, value, bytes);
    return error;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
