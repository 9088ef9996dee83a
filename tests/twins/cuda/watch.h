// Checks of single memory accesses, for kernels compiled to report them: races, reads of unwritten shared memory, and
// accesses outside the tensors of the call.
//
// Two accesses of one byte, not both reads and not both atomic, need an order that does not depend on timing: the same
// thread; a barrier of their block, or a __syncwarp of their warp, between them; or a releasing atomic operation after
// the first, and an acquiring one on the same address before the second. A barrier before the atomic operation makes it
// count for the whole block. Shuffles and votes order nothing (CUDA programming guide, warp functions).
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

namespace twin {

struct Block;
struct Thread;
class Random;

// kConstantRead: through a cache that writes do not update.
enum class Access : uint8_t { kRead, kWrite, kAtomicRead, kAtomicWrite, kConstantRead };

// A caller's tensor inside a larger buffer. The launch must not touch the rest of the buffer.
struct Region {
  uintptr_t owner, owner_bytes;
  uintptr_t first;  // of the rows
  uintptr_t rows, row_bytes, stride_bytes;
  bool writable;
};

// What is known to have happened before a thread's next access: for each block, everything before its nth barrier; for
// single threads, everything before a time on their clocks.
struct Known {
  std::map<uint64_t, uint32_t> blocks;
  std::map<uint64_t, uint32_t> threads;

  void join(const Known& other);
};

struct ThreadWatch {
  uint32_t time = 1;                 // advances at releasing atomics and __syncwarps
  std::array<uint32_t, 32> lanes{};  // per lane of the warp: the time up to which its accesses are known
  Known known;
};

// One recorded access.
struct Stamp {
  uint64_t block;
  uint32_t thread, barriers, time;
  uint8_t bytes;  // of the granule, as bits
  Access access;
};

struct Granule {
  static constexpr int kStamps = 6;
  std::array<Stamp, kStamps> stamps;
  int count = 0;
  uint8_t written = 0, constant = 0;  // which bytes any thread wrote, or read as constant
};

struct BlockWatch {
  uint64_t id = 0;
  uint32_t barriers = 0;
  Known known;  // to all its threads
  std::vector<ThreadWatch> threads;
  std::vector<Granule> shared;
  std::vector<bool> written;  // bytes of shared memory
};

class Watch {
 public:
  explicit Watch(Random& random) : random_(random) {}

  void begin_block(Block& block, size_t shared_bytes);
  void barrier(Block& block);
  void syncwarp(Block& block, int warp, uint32_t lanes);
  // Throws Violation. `shared`: where the block's shared memory begins.
  void access(Thread& thread, uintptr_t address, size_t bytes, Access access, uintptr_t shared, size_t shared_bytes);
  // An atomic operation that releases passes on what its thread knows; one that acquires receives it.
  void pass_on(Thread& thread, uintptr_t address, Ordering order);

 private:
  static bool ordered(const Stamp& before, const Thread& now);
  static Known all_before(Thread& thread);
  void look_at(Granule& granule, const Stamp& now, const Thread& thread, uintptr_t address, const char* memory);
  void check_bounds(uintptr_t address, size_t bytes, bool writes) const;

  Random& random_;
  uint64_t blocks_ = 0;
  std::unordered_map<uintptr_t, Granule> global_;
  std::unordered_map<uintptr_t, Known> passed_on_;
};

// Applies to the following launches, until cleared.
std::vector<Region>& regions();
// If the caller broke the rules (for example gave one row twice), races are not the kernel's fault.
bool& races_are_allowed();

}  // namespace twin
