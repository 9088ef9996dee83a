// One launch as the model runs it: blocks of threads, each a fiber, of which one runs at a time.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "watch.h"

namespace twin {

constexpr int kWarp = 32;

// The order in which threads run. A kernel may assume nothing about it.
struct Options {
  // Several blocks are under way at once; their number is drawn for each launch. Threads yield at atomics, fences and
  // volatile accesses, and an atomic without a result takes effect late.
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

}  // namespace twin
