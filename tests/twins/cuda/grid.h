// The model of a GPU: runs a launch on the host. Each thread is a fiber, and one fiber runs at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "access_checker.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace twin {

// Call stack of one fiber. The page below the stack is inaccessible, so that an overflow faults.
class Stack {
 public:
  static constexpr size_t kBytes = size_t{128} << 10;
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* top() const { return memory_ + kBytes; }
  bool contains(const void* address) const { return address >= memory_ && address < memory_ + kBytes; }
  bool is_in_guard_page(const void* address) const;

 private:
  char* memory_;
};

// Saved execution state of a suspended fiber or of the scheduler.
class Context {
 public:
  // Prepares the context so that switch_to() starts `entry` on this stack. `entry` must not return.
  void prepare(const Stack& stack, void (*entry)());
  // Saves the running context in `from`, and resumes `to`.
  static void switch_to(Context& from, Context& to);

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
};

constexpr int kWarpSize = 32;

// How the model schedules threads and what it checks. Kernels must give correct results for every schedule.
struct SimulationOptions {
  // Several blocks are resident at once; their maximum number is random per launch. Threads yield at atomic operations.
  // The effect of an atomic operation whose result is unused is delayed.
  bool interleaves_blocks = false;
  // Every memory access is checked (access_checker.h). Requires kernels that are compiled with the hooks (hooks.cpp).
  bool checks_accesses = false;
};

// The options of the modes "fast", "resident" and "hooks".
constexpr SimulationOptions kSequentialOptions{false, false};
constexpr SimulationOptions kInterleavedOptions{true, false};
constexpr SimulationOptions kCheckedAccessesOptions{true, true};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  uint32_t next_below(size_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  uint64_t next() {  // splitmix64 (Steele, Lea, Flood 2014)
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

enum class ThreadState : uint8_t { kRunnable, kAtBarrier, kInCollective, kDone };

// An atomic operation that has not taken effect yet.
struct DelayedAtomic {
  void* address;
  AtomicFunction apply;
  uint64_t operand;
};

struct Block;

struct Thread {
  Context context;
  std::unique_ptr<Stack> stack;  // allocated when the thread first runs, and released when it exits
  Block* block;
  uint3 index;         // threadIdx
  int index_in_block;  // linear index
  ThreadState state;
  CallSite call_site;  // source location of the barrier or collective at which the thread waits
  // Arguments of the warp collective that the thread executes; `value` also receives the result.
  Collective collective;
  uint32_t mask;
  uint64_t value;
  int operand;
  std::vector<DelayedAtomic> delayed_atomics;

  int lane() const { return index_in_block % kWarpSize; }
  int warp() const { return index_in_block / kWarpSize; }
};

struct Block {
  uint3 index;  // blockIdx
  std::vector<Thread> threads;
  std::vector<int> runnable_threads;    // indices in the block; the last one runs first
  uint64_t delayed_until_step = 0;      // until this scheduler step, other blocks are preferred
  int num_running;                      // threads that have not exited
  int num_at_barrier;                   // running threads that wait at the barrier
  std::vector<uint32_t> waiting_lanes;  // per warp: mask of the lanes that wait in a collective
  std::vector<uint32_t> running_lanes;  // per warp: mask of the lanes that have not exited
  // Copy of the block's shared memory while the linker section for shared memory contains that of another block.
  std::vector<char> shared_memory;
  std::vector<int4> dynamic_memory;  // with margins, which accesses must not touch
  BlockHistory history;

  int first_thread_of_warp(int warp) const { return warp * kWarpSize; }
  int num_lanes_of_warp(int warp) const;  // less than kWarpSize in the last warp of some blocks
};

// If all lanes of the collective at which `last` waits have arrived, computes the results and returns true. Throws a
// Violation if the lanes break a rule of CUDA.
bool finish_collective_if_complete(Block& block, const Thread& last);

std::string format_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The kernel broke a rule of CUDA.
struct Violation {
  std::string message;
};
// Ends the launch with an error that names the running thread.
[[noreturn]] void fail_launch(const std::string& message);

// Checks a memory access of the running thread. Returns a description of the violated rule, or an empty string.
std::string check_access(void* address, size_t bytes, Access access);
bool is_in_kernel();

const char* get_name(Collective collective);  // of the CUDA function
std::string describe(const Thread& thread);   // "thread 3 of block (0, 0, 0)"
std::string describe(const CallSite& site);   // "file:line"
std::string describe_waiting_threads(const Block& block);

// Interface for the tests: settings of the model, and what the model recorded.

// Options of the following launches, which the caller may change. Default: the mode that the library was built for.
SimulationOptions& options();
// Sets the seed of the following launches' thread order. The first seed is NGRAM_NPU_TWIN_SEED.
void set_seed(uint64_t seed);
// Returns the seed of the launch that is about to begin, and increments the seed.
uint64_t take_next_seed();
// Returns the largest dynamic shared memory of a kernel's blocks that the caller has allowed.
size_t max_dynamic_shared_bytes(const void* kernel);
// Stores an error for cudaGetLastError() and its text for cudaGetErrorString(). Returns the error.
cudaError_t set_error(cudaError_t error, const std::string& text);
// Stores and returns the error with which a launch or a memset on this stream fails before it begins: if the stream is
// not the caller's (ngram_npu_cuda_twin_set_stream), or if a test requested it (ngram_npu_cuda_twin_fail_launches).
cudaError_t check_launch(cudaStream_t stream);
// Swaps the contents of the two buffers of ngram_npu_cuda_twin_swap_at_barriers.
void swap_registered_buffers();

}  // namespace twin

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// Returns the error text of the last failed launch; empty if no launch failed.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_last_error_text();
// Sets the seed of the following launches.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_set_seed(uint64_t seed);
// The next `count` launches fail before their kernel begins.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_fail_launches(int64_t count);
// Between begin_capture and end_capture, launches are not run but added to a graph, which replaces the earlier graph.
// end_capture returns their number. replay runs the graph and returns the first error.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_begin_capture();
NGRAM_TWIN_EXPORT int64_t ngram_npu_cuda_twin_end_capture();
NGRAM_TWIN_EXPORT int32_t ngram_npu_cuda_twin_replay();
// From now on, each barrier swaps the contents of the two buffers with probability 1/2, as if another stream had
// written them. All threads of the block see the new contents after the barrier. With bytes == 0, the swapping stops.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_swap_at_barriers(void* first, void* second, int64_t bytes);
// Sets the caller's stream, at first null. Launches on another stream fail.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_set_stream(void* stream);
// The next three functions affect only launches whose accesses are checked (access_checker.h). With allowed == 1, races
// are not reported. clear_tensors removes all registered tensors. register_tensor adds the rows of a tensor, which
// launches may access, and the buffer around the tensor, whose other bytes launches must not access.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_clear_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_register_tensor(const void* buffer, int64_t buffer_bytes,
                                                           const void* first_row, int64_t num_rows, int64_t row_bytes,
                                                           int64_t stride_bytes, int32_t writable);
