// One launch as the model runs it: blocks of threads, each a fiber, of which one runs at a time.
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

// Memory for one fiber's calls, with an inaccessible page below it: an overflow is a fault, not a stray write.
class Stack {
 public:
  static constexpr size_t kBytes = size_t{128} << 10;
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* top() const { return memory_ + kBytes; }
  bool holds(const void* address) const { return address >= memory_ && address < memory_ + kBytes; }
  bool guards(const void* address) const;

 private:
  char* memory_;
};

// The point at which a suspended thread of control resumes.
class Context {
 public:
  // A context that begins in `entry`, which must not return.
  void begin(const Stack& stack, void (*entry)());
  // Saves the running thread of control in `from`, and resumes `to`.
  static void switch_to(Context& from, Context& to);

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
};

constexpr int kWarp = 32;

// The order in which threads run. A kernel may assume nothing about it.
struct Options {
  // Several blocks are under way at once; their number is drawn for each launch. Threads yield at atomics and volatile
  // accesses, and an atomic without a result takes effect late.
  bool yields = false;
  bool watches = false;  // checks single accesses; the kernels must be compiled to report them
};

constexpr Options kFast{false, false};
constexpr Options kResident{true, false};
constexpr Options kHooks{true, true};

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

struct LateAtomic {
  void* address;
  Apply apply;
  uint64_t operand;
};

struct Block;

struct Thread {
  Context context;
  std::unique_ptr<Stack> stack;  // from its first step to its end
  Block* block;
  uint3 index;
  int number;  // in the block
  State state;
  Site site;  // where it waits
  // Its input to the collective that it waits in, and the result.
  Collective collective;
  uint32_t mask;
  uint64_t value;
  int operand;
  std::vector<LateAtomic> late;

  int lane() const { return number % kWarp; }
  int warp() const { return number / kWarp; }
};

struct Block {
  uint3 index;
  uint64_t number;
  std::vector<Thread> threads;
  std::vector<int> runnable;
  uint64_t behind_until = 0;            // a step of the grid: until then other blocks go first
  int running;                          // threads that have not left
  int at_barrier;                       // of these
  std::vector<uint32_t> in_collective;  // by warp: the lanes that wait
  std::vector<char> shared;             // its shared memory while another block occupies the section
  BlockWatch watch;

  int first_of_warp(int warp) const { return warp * kWarp; }
  int lanes_of_warp(int warp) const;
};

// Whether all lanes of a warp's collective have arrived; if so, computes the results. Throws if a rule is broken.
bool finish_collective(Block& block, const Thread& last);

std::string text_of(const char* format, ...) __attribute__((format(printf, 1, 2)));
struct Violation {
  std::string what;
};
[[noreturn]] void violation(const std::string& what);

// Of the launches in which several blocks worked on one word by atomic operations, those in which two such blocks were
// under way at once.
struct Meetings {
  int64_t launches = 0;
  int64_t met = 0;
};
Meetings& meetings();

// Checks an access of the running thread; returns the rule that it breaks, or nothing.
std::string notice(void* address, size_t bytes, Access access);
bool in_kernel();

const char* name_of(Collective kind);
std::string place_of(const Thread& thread);  // "thread 3 of block (0, 0, 0)"
std::string place_of(const Site& site);      // "file:line"
std::string describe_waiting(const Block& block);

// The tests' control of the model, and its reports to them.

// Sets how kernels are run; the default is the mode that the library was built for.
Options& options();
// Sets the seed of the following launches' thread order. The first seed is NGRAM_NPU_TWIN_SEED.
void set_seed(uint64_t seed);
uint64_t next_seed();  // for the launch that begins
// Stores a launch's error until it is read; returns it.
cudaError_t set_error(cudaError_t error, const std::string& what);
// Whether a test requested that this launch fails (ngram_npu_cuda_twin_fail_launches).
bool next_launch_fails();
// Exchanges the memories of ngram_npu_cuda_twin_exchange_at_barriers.
void exchange();
// Notes which stream a launch was for.
void note_stream(cudaStream_t stream);

}  // namespace twin

#define NGRAM_TWIN_EXPORT extern "C" __attribute__((visibility("default")))

// What the last failed launch did wrong; empty if none failed.
NGRAM_TWIN_EXPORT const char* ngram_npu_cuda_twin_violation();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_seed(uint64_t seed);
// The next `count` launches fail before their kernel begins.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_fail_launches(int64_t count);
// At about half of the barriers from now on the two memories are exchanged, as if another stream wrote them: the block
// of the barrier sees the new values after it, the same in all its threads. Without bytes: no longer.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_exchange_at_barriers(void* one, void* other, int64_t bytes);
// Totals since the library was loaded: see Meetings.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_meetings(int64_t* launches, int64_t* met);
// Writes the streams of the launches since the last call of this, up to `capacity`. Returns their number.
NGRAM_TWIN_EXPORT int64_t ngram_npu_cuda_twin_streams(void** streams, int64_t capacity);
// For watched launches: see watch.h.
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_allow_races(int32_t allowed);
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_forget_tensors();
NGRAM_TWIN_EXPORT void ngram_npu_cuda_twin_tensor(const void* owner, int64_t owner_bytes, const void* first,
                                                  int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                                  int32_t writable);
