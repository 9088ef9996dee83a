// What is noticed of single memory accesses, where the kernels are compiled to report them: races, shared memory that
// nobody wrote, and whatever lies outside the tensors of the call.
//
// Two accesses of one byte, not both reads and not both atomic, need an order that does not depend on luck: the same
// thread; a barrier of their block, or a __syncwarp of their warp, between them; or a fence after the first, an atomic
// operation, one that comes after it on the same address, and a fence before the second; or such operations that
// release and acquire by themselves. A barrier before the fence makes it count for the whole block. Shuffles and votes
// order nothing (CUDA programming guide, warp functions), nor does a fence that is the block's alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "twin/model.h"

namespace twin {

struct Block;
struct Thread;
class Random;

// kConstantRead: through a cache that no write reaches.
enum class Access : uint8_t { kRead, kWrite, kAtomicRead, kAtomicWrite, kConstantRead };

// A tensor of the caller's in the buffer it is a part of. What else lies in the buffer is nobody's business.
struct Region {
  uintptr_t owner, owner_bytes;
  uintptr_t first;  // of the rows
  uintptr_t rows, row_bytes, stride_bytes;
  bool writable;
};

// What one thread can be sure has happened: of each block all before its nth barrier, of single threads all before a
// time of theirs.
struct Known {
  std::map<uint64_t, uint32_t> blocks;
  std::map<uint64_t, uint32_t> threads;

  void join(const Known& other);
};

struct ThreadWatch {
  uint32_t time = 1;                       // moves on at fences and __syncwarps
  std::array<uint32_t, 32> lanes{};        // of each lane of the warp, all up to this time is known
  Known known, seen_by_atomics, released;  // released: what an atomic operation now passes on
};

// One access, remembered.
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
  void fence(Thread& thread);
  // Throws Violation. `shared`: where the block's shared memory begins.
  void access(Thread& thread, uintptr_t address, size_t bytes, Access access, uintptr_t shared, size_t shared_bytes);
  // An atomic operation passes on what its thread released, and learns what others did.
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

// For the launches that follow, until forgotten.
std::vector<Region>& regions();
// Where the caller broke the rules himself (one row given twice), races are his.
bool& races_are_allowed();

}  // namespace twin
