// Simulates one kernel launch on the host. Each thread of each block is a fiber; one fiber runs at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "watch.h"

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
  // Prepares the context to start in `entry`, which must not return.
  void begin(const Stack& stack, void (*entry)());
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

// How threads are scheduled and checked. Kernels must give correct results for every schedule.
struct SimulationOptions {
  // Several blocks are resident at once; each launch draws a random number of them. Threads yield at atomics and
  // volatile accesses. The effect of an atomic operation without a result is delayed.
  bool interleaves_blocks = false;
  bool checks_accesses = false;  // needs kernels compiled with the access hooks (hooks.cpp)
};

constexpr SimulationOptions kFast{false, false};
constexpr SimulationOptions kResident{true, false};
constexpr SimulationOptions kHooks{true, true};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
  uint32_t below(size_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  uint64_t next() {  // splitmix64 (Steele, Lea, Flood 2014)
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

enum class State : uint8_t { kRunnable, kAtBarrier, kInCollective, kDone };

struct DelayedAtomic {
  void* address;
  Apply apply;
  uint64_t operand;
};

struct Block;

struct Thread {
  Context context;
  std::unique_ptr<Stack> stack;  // allocated when the thread first runs, and released when it exits
  Block* block;
  uint3 index;
  int index_in_block;
  State state;
  Site site;  // source location of the barrier or collective at which the thread waits
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
  uint3 index;
  uint64_t number;
  std::vector<Thread> threads;
  std::vector<int> runnable;
  uint64_t delayed_until_step = 0;      // until this scheduler step, other blocks are preferred
  int num_running;                      // threads that have not exited
  int num_at_barrier;                   // running threads that wait at the barrier
  std::vector<uint32_t> in_collective;  // per warp: mask of the lanes that wait in a collective
  std::vector<char> shared;             // copy of the block's shared memory while the section holds another block's
  BlockWatch watch;

  int first_of_warp(int warp) const { return warp * kWarpSize; }
  int lanes_of_warp(int warp) const;
};

// Returns whether all lanes of the collective of `last` have arrived, and then computes the results. Throws a Violation
// if the lanes break a rule.
bool finish_collective_if_complete(Block& block, const Thread& last);

std::string format_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
struct Violation {
  std::string what;
};
[[noreturn]] void violation(const std::string& what);

// Launches in which several blocks applied atomic operations to the same word, and those among these launches in which
// two such blocks were resident at the same time.
struct BlockOverlapCounts {
  int64_t launches_sharing_a_word = 0;
  int64_t launches_with_overlap = 0;
};
BlockOverlapCounts& block_overlap_counts();

// Checks a memory access of the running thread. Returns a description of the violated rule, or an empty string.
std::string check_access(void* address, size_t bytes, Access access);
bool in_kernel();

const char* name_of(Collective kind);
std::string place_of(const Thread& thread);  // "thread 3 of block (0, 0, 0)"
std::string place_of(const Site& site);      // "file:line"
std::string describe_waiting(const Block& block);

// Interface for the tests: settings of the model, and what it recorded.

// Options of the following launches, which the caller may change. Default: the mode that the library was built for.
SimulationOptions& options();
// Sets the seed of the following launches' thread order. The first seed is NGRAM_NPU_TWIN_SEED.
void set_seed(uint64_t seed);
uint64_t next_seed();  // for the launch that begins
// Stores an error for cudaGetLastError() and its text for cudaGetErrorString(). Returns the error.
cudaError_t set_error(cudaError_t error, const std::string& what);
// Returns whether a test requested that this launch fails (ngram_npu_cuda_twin_fail_launches), and counts the request.
bool take_requested_failure();
// Swaps the contents of the two buffers of ngram_npu_cuda_twin_swap_at_barriers.
void swap_registered_buffers();
// Records the stream of a launch for ngram_npu_cuda_twin_streams.
void record_stream(cudaStream_t stream);

}  // namespace twin

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// Returns the error text of the last failed launch; empty if no launch failed.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_violation();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_seed(uint64_t seed);
// The next `count` launches fail before their kernel begins.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_fail_launches(int64_t count);
// From now on, each barrier swaps the contents of the two buffers with probability 1/2, as if another stream had
// written them. All threads of the block see the new contents after the barrier. With bytes == 0, the swapping stops.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_swap_at_barriers(void* first, void* second, int64_t bytes);
// Returns the fields of BlockOverlapCounts, counted since the library was loaded.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_block_overlaps(int64_t* launches_sharing_a_word,
                                                          int64_t* launches_with_overlap);
// Writes the streams of the launches since the previous call, at most `capacity`. Returns the number of the launches.
NGRAM_TWIN_EXPORT int64_t ngram_npu_cuda_twin_streams(void** streams, int64_t capacity);
// For launches whose accesses are checked (watch.h).
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_forget_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_register_tensor(const void* owner, int64_t owner_bytes, const void* first,
                                                           int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                                           int32_t writable);
