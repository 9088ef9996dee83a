// Checks each memory access of kernels that are compiled with the hooks (hooks.cpp). Reports races, reads of unwritten
// shared memory, and accesses outside the tensors of the call.
//
// Two accesses to the same byte, not both reads and not both atomic, are a race unless they are ordered independently
// of timing. They are ordered if the same thread makes both accesses; if a barrier of their block, or a __syncwarp of
// their warp, lies between them; or if a releasing atomic operation follows the first access, and an acquiring atomic
// operation on the same address precedes the second access. If a barrier precedes the releasing operation, that
// operation releases the earlier accesses of the whole block. Shuffles and votes order nothing (CUDA programming guide,
// warp functions).
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

// kConstantRead: a read through the cache of __ldg, which writes do not update.
enum class Access : uint8_t { kRead, kWrite, kAtomic, kConstantRead };

// A tensor of the caller inside a larger buffer. The launch must not access the rest of the buffer.
struct Region {
  uintptr_t buffer, buffer_bytes;
  uintptr_t first_row;
  uintptr_t num_rows, row_bytes, stride_bytes;
  bool writable;
};

// The accesses that are known to have happened before a thread's next access. Blocks and threads have unique ids.
struct KnownAccesses {
  // By block id: the accesses that the block made before it had passed this many barriers are known.
  std::map<uint64_t, uint32_t> block_barriers;
  // By thread id: the accesses that the thread made up to this time on its clock are known.
  std::map<uint64_t, uint32_t> thread_times;

  void join(const KnownAccesses& other);
};

struct ThreadHistory {
  uint32_t time = 1;                      // the thread's clock: advances at releasing atomics and __syncwarps
  std::array<uint32_t, 32> lane_times{};  // per lane of the warp: the time up to which its accesses are known
  KnownAccesses known;
};

// One recorded access.
struct AccessRecord {
  uint64_t block;
  uint32_t thread, num_barriers, time;  // num_barriers: how many barriers the block had passed
  uint8_t byte_mask;                    // one bit per byte of the granule
  Access type;
};

// Eight aligned bytes of memory, and the recorded accesses to them.
struct Granule {
  static constexpr int kMaxRecords = 6;  // if full, a random record is replaced
  std::array<AccessRecord, kMaxRecords> records;
  int num_records = 0;
  uint8_t written_mask = 0, constant_mask = 0;  // the bytes that any thread wrote, or read as constant
};

struct BlockHistory {
  uint64_t id = 0;
  uint32_t num_barriers = 0;
  KnownAccesses known;  // to all threads of the block
  std::vector<ThreadHistory> threads;
  std::vector<Granule> shared_granules;
  std::vector<bool> shared_byte_written;
};

class AccessChecker {
 public:
  explicit AccessChecker(Random& random) : random_(random) {}

  void begin_block(Block& block, size_t shared_bytes);
  void record_barrier(Block& block);
  void record_syncwarp(Block& block, int warp, uint32_t lanes);
  // Throws a Violation if the access breaks a rule. `shared_offset` is the offset in the block's shared memory, or at
  // least the number of its bytes if the address is in global memory.
  void check_access(Thread& thread, uintptr_t address, size_t bytes, Access access, size_t shared_offset);
  // A releasing atomic operation stores the known accesses of its thread for the address. An acquiring atomic operation
  // adds the stored accesses to the known accesses of its thread.
  void record_atomic_order(Thread& thread, uintptr_t address, AtomicOrder order);

 private:
  static bool is_ordered(const AccessRecord& earlier, const Thread& thread);
  static KnownAccesses release_accesses(Thread& thread);
  void check_granule(Granule& granule, const AccessRecord& access, const Thread& thread, uintptr_t address,
                     const char* memory);
  void check_bounds(uintptr_t address, size_t bytes, bool is_write) const;

  Random& random_;  // chooses which record of a full granule is replaced
  uint64_t num_blocks_ = 0;
  std::unordered_map<uintptr_t, Granule> global_granules_;
  std::unordered_map<uintptr_t, KnownAccesses> released_accesses_;  // by address of the atomic operation
};

// The tensors that the following launches may access, until the list is cleared.
std::vector<Region>& registered_regions();
// Whether races are not reported: if the caller broke the contract (e.g. passed one row twice), the kernel may race.
bool& races_are_allowed();

}  // namespace twin
