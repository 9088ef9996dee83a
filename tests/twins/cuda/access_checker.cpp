#include "access_checker.h"

#include <algorithm>

#include "grid.h"

namespace twin {
namespace {

constexpr uintptr_t kGranuleBytes = 8;

bool is_write(Access access) { return access == Access::kWrite || access == Access::kAtomic; }
bool is_atomic(Access access) { return access == Access::kAtomic; }
bool are_conflicting(Access a, Access b) { return (is_write(a) || is_write(b)) && !(is_atomic(a) && is_atomic(b)); }

const char* get_verb(Access access) {
  switch (access) {
    case Access::kRead: return "reads";
    case Access::kWrite: return "writes";
    case Access::kConstantRead: return "reads as constant";
    default: return "changes atomically";
  }
}

uint64_t make_thread_id(uint64_t block, uint32_t thread) { return block << 10 | thread; }

template <class Map, class Key>
uint32_t find_or_zero(const Map& map, Key key) {
  const auto entry = map.find(key);
  return entry == map.end() ? 0 : entry->second;
}

void raise_to(uint32_t& value, uint32_t minimum) { value = std::max(value, minimum); }

}  // namespace

std::vector<Region>& registered_regions() {
  static std::vector<Region> registered;
  return registered;
}

bool& races_are_allowed() {
  static bool allowed = false;
  return allowed;
}

void KnownAccesses::join(const KnownAccesses& other) {
  for (const auto& [block, barriers] : other.block_barriers) raise_to(block_barriers[block], barriers);
  for (const auto& [thread, time] : other.thread_times) raise_to(thread_times[thread], time);
}

void AccessChecker::begin_block(Block& block, size_t shared_bytes) {
  BlockHistory& history = block.history;
  history.id = num_blocks_++;
  history.threads.resize(block.threads.size());
  history.shared_granules.resize(shared_bytes / kGranuleBytes + 1);
  history.shared_byte_written.assign(shared_bytes, false);
}

void AccessChecker::record_barrier(Block& block) {
  BlockHistory& history = block.history;
  ++history.num_barriers;
  for (ThreadHistory& thread : history.threads) {
    history.known.join(thread.known);
    thread.known = {};
  }
}

void AccessChecker::record_syncwarp(Block& block, int warp, uint32_t lanes) {
  const auto first = static_cast<size_t>(block.first_thread_of_warp(warp));
  std::array<uint32_t, 32> lane_times{};
  KnownAccesses known;
  for (size_t lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    const ThreadHistory& thread = block.history.threads[first + lane];
    for (size_t other = 0; other < 32; ++other) raise_to(lane_times[other], thread.lane_times[other]);
    raise_to(lane_times[lane], thread.time);
    known.join(thread.known);
  }
  for (size_t lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    ThreadHistory& thread = block.history.threads[first + lane];
    thread.lane_times = lane_times;
    thread.known = known;
    ++thread.time;
  }
}

// Returns the known accesses of a thread, including its own, and advances its clock.
KnownAccesses AccessChecker::release_accesses(Thread& thread) {
  BlockHistory& block = thread.block->history;
  ThreadHistory& history = block.threads[static_cast<size_t>(thread.index_in_block)];
  KnownAccesses released = history.known;
  released.join(block.known);
  raise_to(released.block_barriers[block.id], block.num_barriers);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (history.lane_times[lane] == 0) continue;
    const uint32_t index = static_cast<uint32_t>(thread.warp()) * 32 + lane;
    raise_to(released.thread_times[make_thread_id(block.id, index)], history.lane_times[lane]);
  }
  raise_to(released.thread_times[make_thread_id(block.id, static_cast<uint32_t>(thread.index_in_block))],
           history.time++);
  return released;
}

void AccessChecker::record_atomic_order(Thread& thread, uintptr_t address, AtomicOrder order) {
  KnownAccesses& released = released_accesses_[address];
  const KnownAccesses acquired = released;
  if (order.releases) released.join(release_accesses(thread));
  if (order.acquires) thread.block->history.threads[static_cast<size_t>(thread.index_in_block)].known.join(acquired);
}

bool AccessChecker::is_ordered(const AccessRecord& earlier, const Thread& thread) {
  const BlockHistory& block = thread.block->history;
  const auto index = static_cast<uint32_t>(thread.index_in_block);
  const ThreadHistory& history = block.threads[index];
  if (earlier.block == block.id) {
    if (earlier.thread == index || earlier.num_barriers < block.num_barriers) return true;
    const bool is_same_warp = earlier.thread / kWarpSize == static_cast<uint32_t>(thread.warp());
    if (is_same_warp && history.lane_times[earlier.thread % kWarpSize] >= earlier.time) return true;
  }
  for (const KnownAccesses* known : {&history.known, &block.known}) {
    if (earlier.num_barriers < find_or_zero(known->block_barriers, earlier.block)) return true;
    if (earlier.time <= find_or_zero(known->thread_times, make_thread_id(earlier.block, earlier.thread))) return true;
  }
  return false;
}

void AccessChecker::check_granule(Granule& granule, const AccessRecord& access, const Thread& thread, uintptr_t address,
                                  const char* memory) {
  uint8_t& mask = is_write(access.type) ? granule.written_mask : granule.constant_mask;
  if (is_write(access.type) || access.type == Access::kConstantRead)
    mask = static_cast<uint8_t>(mask | access.byte_mask);
  if ((granule.written_mask & granule.constant_mask & access.byte_mask) != 0) {
    throw Violation{format_text("%s %s %s memory at %p, which the same launch %s", describe(thread).c_str(),
                                get_verb(access.type), memory, reinterpret_cast<void*>(address),
                                is_write(access.type) ? "reads as constant" : "writes")};
  }
  AccessRecord* replaced = nullptr;
  for (int i = 0; i < granule.num_records; ++i) {
    AccessRecord& earlier = granule.records[static_cast<size_t>(i)];
    const bool is_same_thread = earlier.block == access.block && earlier.thread == access.thread;
    if ((earlier.byte_mask & access.byte_mask) != 0 && are_conflicting(earlier.type, access.type) &&
        !races_are_allowed() && !is_ordered(earlier, thread)) {
      throw Violation{format_text(
          "race: %s %s %s memory at %p, thread %u of block number %llu %s it, and nothing orders the two accesses",
          describe(thread).c_str(), get_verb(access.type), memory, reinterpret_cast<void*>(address), earlier.thread,
          static_cast<unsigned long long>(earlier.block), get_verb(earlier.type))};
    }
    // A read must not replace a recorded write: later accesses must still be compared with that write.
    const bool is_covered = (earlier.byte_mask & ~access.byte_mask) == 0 &&
                            (is_write(access.type) || !is_write(earlier.type)) &&
                            is_atomic(earlier.type) == is_atomic(access.type);
    if (is_covered && (is_same_thread || (is_write(access.type) && is_ordered(earlier, thread)))) replaced = &earlier;
  }
  if (replaced == nullptr && granule.num_records < Granule::kMaxRecords) {
    replaced = &granule.records[static_cast<size_t>(granule.num_records++)];
  }
  if (replaced == nullptr) {
    AccessRecord& candidate = granule.records[random_.next_below(Granule::kMaxRecords)];
    if (!is_write(access.type) && is_write(candidate.type)) return;
    replaced = &candidate;
  }
  *replaced = access;
}

void AccessChecker::check_bounds(uintptr_t address, size_t bytes, bool is_write) const {
  bool is_in_buffer = false;
  for (const Region& region : registered_regions()) {
    if (address + bytes <= region.buffer || address >= region.buffer + region.buffer_bytes) continue;
    is_in_buffer = true;
    if (address < region.first_row || (is_write && !region.writable)) continue;
    const uintptr_t offset = address - region.first_row;
    const uintptr_t row = region.stride_bytes == 0 ? 0 : offset / region.stride_bytes;
    if (row < region.num_rows && offset - row * region.stride_bytes + bytes <= region.row_bytes) return;
  }
  if (is_in_buffer) {
    throw Violation{format_text(
        "%s %zu bytes at %p, which %s", is_write ? "writes" : "reads", bytes, reinterpret_cast<void*>(address),
        is_write ? "are not part of a tensor that may be written" : "are not part of a tensor")};
  }
}

void AccessChecker::check_access(Thread& thread, uintptr_t address, size_t bytes, Access access, size_t shared_offset) {
  BlockHistory& block = thread.block->history;
  const size_t shared_bytes = block.shared_byte_written.size();
  const bool is_shared = shared_offset < shared_bytes;
  if (is_shared) {
    for (size_t offset = shared_offset; offset < shared_offset + bytes && offset < shared_bytes; ++offset) {
      if (access != Access::kWrite && !block.shared_byte_written[offset]) {
        throw Violation{format_text("%s %s shared memory at offset %zu, which no thread wrote",
                                    describe(thread).c_str(), get_verb(access), offset)};
      }
      if (is_write(access)) block.shared_byte_written[offset] = true;
    }
  } else {
    check_bounds(address, bytes, is_write(access));
  }
  for (uintptr_t begin = address; begin < address + bytes;) {
    const uintptr_t granule = begin / kGranuleBytes * kGranuleBytes;
    const uintptr_t end = std::min(granule + kGranuleBytes, address + bytes);
    const auto mask = static_cast<uint8_t>(((1u << (end - begin)) - 1u) << (begin - granule));
    const auto index = static_cast<uint32_t>(thread.index_in_block);
    const AccessRecord record{block.id, index, block.num_barriers, block.threads[index].time, mask, access};
    if (is_shared) {
      const size_t number = (shared_offset + (granule - address)) / kGranuleBytes;
      check_granule(block.shared_granules[number], record, thread, begin, "shared");
    } else {
      check_granule(global_granules_[granule], record, thread, begin, "global");
    }
    begin = end;
  }
}

}  // namespace twin
