#include "watch.h"

#include <algorithm>

#include "grid.h"

namespace twin {
namespace {

constexpr uintptr_t kGranule = 8;

bool writes(Access access) { return access == Access::kWrite || access == Access::kAtomicWrite; }
bool is_atomic(Access access) { return access == Access::kAtomicRead || access == Access::kAtomicWrite; }
bool conflict(Access a, Access b) { return (writes(a) || writes(b)) && !(is_atomic(a) && is_atomic(b)); }

const char* verb(Access access) {
  switch (access) {
    case Access::kRead: return "reads";
    case Access::kWrite: return "writes";
    case Access::kConstantRead: return "reads as constant";
    case Access::kAtomicRead: return "reads (volatile)";
    default: return "changes atomically";
  }
}

uint64_t id_of(uint64_t block, uint32_t thread) { return block << 10 | thread; }

template <class Map, class Key>
uint32_t at(const Map& map, Key key) {
  const auto entry = map.find(key);
  return entry == map.end() ? 0 : entry->second;
}

void raise_to(uint32_t& value, uint32_t other) { value = std::max(value, other); }

}  // namespace

std::vector<Region>& regions() {
  static std::vector<Region> registered;
  return registered;
}

bool& races_are_allowed() {
  static bool allowed = false;
  return allowed;
}

void Known::join(const Known& other) {
  for (const auto& [block, barriers] : other.blocks) raise_to(blocks[block], barriers);
  for (const auto& [thread, time] : other.threads) raise_to(threads[thread], time);
}

void Watch::begin_block(Block& block, size_t shared_bytes) {
  BlockWatch& watch = block.watch;
  watch.id = blocks_++;
  watch.threads.resize(block.threads.size());
  watch.shared.resize(shared_bytes / kGranule + 1);
  watch.written.assign(shared_bytes, false);
}

void Watch::barrier(Block& block) {
  BlockWatch& watch = block.watch;
  ++watch.barriers;
  for (ThreadWatch& thread : watch.threads) {
    watch.known.join(thread.known);
    thread.known = {};
  }
}

void Watch::syncwarp(Block& block, int warp, uint32_t lanes) {
  const auto first = static_cast<size_t>(block.first_of_warp(warp));
  std::array<uint32_t, 32> together{};
  Known known;
  for (size_t lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    const ThreadWatch& thread = block.watch.threads[first + lane];
    for (size_t other = 0; other < 32; ++other) raise_to(together[other], thread.lanes[other]);
    raise_to(together[lane], thread.time);
    known.join(thread.known);
  }
  for (size_t lane = 0; lane < 32; ++lane) {
    if ((lanes >> lane & 1u) == 0) continue;
    ThreadWatch& thread = block.watch.threads[first + lane];
    thread.lanes = together;
    thread.known = known;
    ++thread.time;
  }
}

// Everything that happened before the thread's next access, its own accesses included.
Known Watch::all_before(Thread& t) {
  BlockWatch& block = t.block->watch;
  ThreadWatch& thread = block.threads[static_cast<size_t>(t.index_in_block)];
  Known released = thread.known;
  released.join(block.known);
  raise_to(released.blocks[block.id], block.barriers);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (thread.lanes[lane] == 0) continue;
    raise_to(released.threads[id_of(block.id, static_cast<uint32_t>(t.warp()) * 32 + lane)], thread.lanes[lane]);
  }
  raise_to(released.threads[id_of(block.id, static_cast<uint32_t>(t.index_in_block))], thread.time++);
  return released;
}

void Watch::pass_on(Thread& t, uintptr_t address, Ordering order) {
  Known& here = passed_on_[address];
  const Known seen = here;
  if (order.releases) here.join(all_before(t));
  if (order.acquires) t.block->watch.threads[static_cast<size_t>(t.index_in_block)].known.join(seen);
}

bool Watch::ordered(const Stamp& before, const Thread& now) {
  const BlockWatch& block = now.block->watch;
  const ThreadWatch& thread = block.threads[static_cast<size_t>(now.index_in_block)];
  if (before.block == block.id) {
    if (before.thread == static_cast<uint32_t>(now.index_in_block) || before.barriers < block.barriers) return true;
    const bool same_warp = before.thread / kWarpSize == static_cast<uint32_t>(now.warp());
    if (same_warp && thread.lanes[before.thread % kWarpSize] >= before.time) return true;
  }
  for (const Known* known : {&thread.known, &block.known}) {
    if (before.barriers < at(known->blocks, before.block)) return true;
    if (before.time <= at(known->threads, id_of(before.block, before.thread))) return true;
  }
  return false;
}

void Watch::look_at(Granule& granule, const Stamp& now, const Thread& thread, uintptr_t address, const char* memory) {
  uint8_t& bytes = writes(now.access) ? granule.written : granule.constant;
  if (writes(now.access) || now.access == Access::kConstantRead) bytes = static_cast<uint8_t>(bytes | now.bytes);
  if ((granule.written & granule.constant & now.bytes) != 0) {
    throw Violation{format_text("%s %s %s memory at %p, which the same launch %s", place_of(thread).c_str(),
                                verb(now.access), memory, reinterpret_cast<void*>(address),
                                writes(now.access) ? "reads as constant" : "writes")};
  }
  Stamp* slot = nullptr;
  for (int i = 0; i < granule.count; ++i) {
    Stamp& before = granule.stamps[static_cast<size_t>(i)];
    const bool mine = before.block == now.block && before.thread == now.thread;
    if ((before.bytes & now.bytes) != 0 && conflict(before.access, now.access) && !races_are_allowed() &&
        !ordered(before, thread)) {
      throw Violation{
          format_text("race: %s %s %s memory at %p, as does thread %u of block number %llu, which %s it, in no order",
                      place_of(thread).c_str(), verb(now.access), memory, reinterpret_cast<void*>(address),
                      before.thread, static_cast<unsigned long long>(before.block), verb(before.access))};
    }
    // A read must not replace a recorded write: later accesses must still be compared with that write.
    const bool covered = (before.bytes & ~now.bytes) == 0 && (writes(now.access) || !writes(before.access)) &&
                         is_atomic(before.access) == is_atomic(now.access);
    if (covered && (mine || (writes(now.access) && ordered(before, thread)))) slot = &before;
  }
  if (slot == nullptr && granule.count < Granule::kStamps) slot = &granule.stamps[static_cast<size_t>(granule.count++)];
  if (slot == nullptr) {
    Stamp& any = granule.stamps[random_.below(Granule::kStamps)];
    if (!writes(now.access) && writes(any.access)) return;
    slot = &any;
  }
  *slot = now;
}

void Watch::check_bounds(uintptr_t address, size_t bytes, bool is_write) const {
  bool in_a_buffer = false;
  for (const Region& region : regions()) {
    if (address + bytes <= region.owner || address >= region.owner + region.owner_bytes) continue;
    in_a_buffer = true;
    if (address < region.first || (is_write && !region.writable)) continue;
    const uintptr_t offset = address - region.first;
    const uintptr_t row = region.stride_bytes == 0 ? 0 : offset / region.stride_bytes;
    if (row < region.rows && offset - row * region.stride_bytes + bytes <= region.row_bytes) return;
  }
  if (in_a_buffer) {
    throw Violation{format_text("%s %zu bytes at %p, which %s", is_write ? "writes" : "reads", bytes,
                                reinterpret_cast<void*>(address),
                                is_write ? "no tensor has that may be written" : "no tensor has")};
  }
}

void Watch::access(Thread& thread, uintptr_t address, size_t bytes, Access access, uintptr_t shared,
                   size_t shared_bytes) {
  BlockWatch& block = thread.block->watch;
  const bool is_shared = address >= shared && address < shared + shared_bytes;
  if (is_shared) {
    for (size_t i = 0; i < bytes && address - shared + i < shared_bytes; ++i) {
      const size_t at_byte = address - shared + i;
      if (access != Access::kWrite && !block.written[at_byte]) {
        throw Violation{format_text("%s %s shared memory at offset %zu, which no thread wrote",
                                    place_of(thread).c_str(), verb(access), at_byte)};
      }
      if (writes(access)) block.written[at_byte] = true;
    }
  } else {
    check_bounds(address, bytes, writes(access));
  }
  for (uintptr_t from = address; from < address + bytes;) {
    const uintptr_t granule = from / kGranule * kGranule;
    const uintptr_t to = std::min(granule + kGranule, address + bytes);
    const auto mask = static_cast<uint8_t>(((1u << (to - from)) - 1u) << (from - granule));
    const auto number = static_cast<uint32_t>(thread.index_in_block);
    const Stamp now{block.id, number, block.barriers, block.threads[number].time, mask, access};
    if (is_shared) {
      look_at(block.shared[(granule - shared) / kGranule], now, thread, from, "shared");
    } else {
      look_at(global_[granule], now, thread, from, "global");
    }
    from = to;
  }
}

}  // namespace twin
