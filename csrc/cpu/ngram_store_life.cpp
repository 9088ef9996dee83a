// A store made, checked, counted and cleared, for those who own it (api/numpy/store_tools.cpp).
#include <algorithm>
#include <vector>

#include "cpu/ngram_store.h"

using namespace ngram_npu;
using namespace ngram_npu::store;

namespace {

// Opens a const tensor with the operators' function, for reading.
bool open_to_read(const int32_t* words, int64_t num_words, cpu::Store* store) {
  return cpu::open_store(const_cast<int32_t*>(words), num_words, store);
}

StoreFault check_slots(const cpu::Store& store, int64_t* where) {
  std::vector<uint32_t> newest;
  for (uint32_t i = 0; i < store.num_slots; ++i) {
    *where = i;
    const uint32_t* slot = store.slot(i);
    if (!store.alive(slot[kSlotSerial])) continue;
    if (store.fill(slot[kSlotSerial]) > slot[kSlotLength] + kOverlap) return kStoreFaultSlot;
    newest.push_back(slot[kSlotSerial]);
  }
  std::sort(newest.begin(), newest.end());
  return std::adjacent_find(newest.begin(), newest.end()) == newest.end() ? kStoreFaultNone : kStoreFaultSlot;
}

// The possible sizes of an entry's gram: a bit for each level.
uint32_t levels_of(const cpu::Store& store, const Entry* line, const Entry& entry) {
  const uint32_t serial = entry.place >> kBlockBits, offset = entry.place % kBlockTokens;
  const cpu::GramKeys keys = cpu::keys_before(store.text(serial) + offset, offset, scope_seed(store.scope(serial)));
  uint32_t levels = 0;
  for (uint32_t level = 0; level < keys.levels; ++level) {
    const bool here = store.line(keys.of[level]) == line && (keys.of[level] & 0xffffffu) == entry.state >> 8;
    levels |= uint32_t{here} << level;
  }
  return levels;
}

bool same_gram(const cpu::Store& store, const Entry& a, const Entry& b, uint32_t level) {
  const auto gram = [&](const Entry& entry) {
    return store.text(entry.place >> kBlockBits) + entry.place % kBlockTokens - ladder_size(level);
  };
  return store.scope(a.place >> kBlockBits) == store.scope(b.place >> kBlockBits) &&
         std::equal(gram(a), gram(a) + ladder_size(level), gram(b));
}

StoreFault check_line(const cpu::Store& store, const Entry* line) {
  uint32_t levels[kLineEntries] = {};
  for (uint32_t i = 0; i < kLineEntries; ++i) {
    const Entry& entry = line[i];
    const uint32_t serial = entry.place >> kBlockBits;
    const uint32_t next = store.header[kHeaderNextSerial];
    if (serial >= next) return kStoreFaultPlace;
    if (!store.alive(serial)) {  // overwritten; entries of cleared text are removed
      if (serial != 0 && next - serial <= store.num_blocks) return kStoreFaultPlace;
      continue;
    }
    if (entry.place % kBlockTokens >= store.fill(serial)) return kStoreFaultPlace;
    if ((entry.state & kMaxCount) > (entry.state >> 4 & kMaxCount) + 1) return kStoreFaultCounts;
    levels[i] = levels_of(store, line, entry);
    if (levels[i] == 0) return kStoreFaultKey;
    for (uint32_t j = 0; j < i; ++j) {
      for (uint32_t level = 0; level < kLadderLevels; ++level) {
        const bool both = (levels[i] & levels[j]) >> level & 1;
        if (both && same_gram(store, line[j], entry, level)) return kStoreFaultTwice;
      }
    }
  }
  return kStoreFaultNone;
}

StoreFault check(const cpu::Store& store, int64_t* where) {
  if (const StoreFault fault = cpu::check_blocks(store, where)) return fault;
  if (const StoreFault fault = check_slots(store, where)) return fault;
  for (uint64_t i = 0; i < uint64_t{1} << store.line_bits; ++i) {
    *where = static_cast<int64_t>(i);
    const auto* line = reinterpret_cast<const Entry*>(store.lines + i * kLineWords);
    if (const StoreFault fault = check_line(store, line)) return fault;
  }
  *where = 0;
  return kStoreFaultNone;
}

}  // namespace

StoreFault cpu::check_blocks(const Store& store, int64_t* where) {
  const uint32_t next = store.header[kHeaderNextSerial];
  if (next == 0 || next > kEndOfSerials) return kStoreFaultHeader;
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    *where = i;
    const uint32_t* head = store.heads + size_t{i} * kHeadWords;
    const uint32_t serial = head[kHeadSerial];
    if (serial == 0) continue;
    if (store.block_of(serial) != i || serial >= next || next - serial > store.num_blocks) return kStoreFaultBlock;
    if (head[kHeadFill] > kBlockTokens || head[kHeadFirst] > smaller(head[kHeadFill], kOverlap)) {
      return kStoreFaultFill;
    }
    const uint32_t previous = head[kHeadPrevious];
    if (previous >= serial) return kStoreFaultLink;
    if (store.alive(previous) && store.scope(previous) != store.scope(serial)) return kStoreFaultLink;
  }
  return kStoreFaultNone;
}

void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits, int64_t parts[6]) {
  const cpu::StoreParts found = cpu::store_parts(num_slots, num_blocks, line_bits);
  const int64_t words[] = {found.slots, found.heads, found.lines, found.tokens, found.bytes, found.end};
  std::copy(std::begin(words), std::end(words), parts);
}

int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots, int64_t num_blocks,
                                       int64_t line_bits, uint32_t visibility) {
  const cpu::StoreParts parts = cpu::store_parts(num_slots, num_blocks, line_bits);
  if (parts.end == 0 || parts.end > words || visibility > kFinish) return kInvalidParams;
  auto* const header = reinterpret_cast<uint32_t*>(store);
  header[kHeaderMagic] = kMagic;
  header[kHeaderSlots] = static_cast<uint32_t>(num_slots);
  header[kHeaderBlocks] = static_cast<uint32_t>(num_blocks);
  header[kHeaderLineBits] = static_cast<uint32_t>(line_bits);
  header[kHeaderVisibility] = visibility;
  header[kHeaderNextSerial] = 1;
  return kOk;
}

int32_t ngram_npu_cpu_ngram_store_check(const int32_t* words, int64_t num_words, int64_t* where) {
  cpu::Store store;
  *where = 0;
  return open_to_read(words, num_words, &store) ? check(store, where) : kStoreFaultHeader;
}

void ngram_npu_cpu_ngram_store_held(const int32_t* words, int64_t num_words, int64_t held[3]) {
  cpu::Store store;
  std::fill_n(held, 3, 0);
  if (!open_to_read(words, num_words, &store)) return;
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    const uint32_t* head = store.heads + size_t{i} * kHeadWords;
    if (head[kHeadSerial] == 0) continue;
    held[0] += int64_t{smaller(head[kHeadFill], kBlockTokens)} - smaller(head[kHeadFirst], head[kHeadFill]);
    ++held[1];
  }
  for (uint32_t i = 0; i < store.num_slots; ++i) held[2] += store.alive(store.slot(i)[kSlotSerial]);
}

bool ngram_npu_cpu_ngram_store_take(int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(words, num_words, &store) && cpu::StoreUse::take(store);
}

void ngram_npu_cpu_ngram_store_give_back(int32_t* words, int64_t num_words) {
  cpu::Store store;
  if (cpu::open_store(words, num_words, &store)) cpu::StoreUse::give_back(store);
}

void ngram_npu_cpu_ngram_store_clear(int32_t* words, int64_t num_words, const int64_t* scope) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return;
  ++store.header[kHeaderEpoch];
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    const uint32_t serial = head[kHeadSerial];
    if (serial == 0 || (scope != nullptr && store.scope(serial) != static_cast<uint64_t>(*scope))) continue;
    std::fill_n(store.text(i), kBlockTokens, 0);
    std::fill_n(store.outcomes(i), kBlockTokens, uint8_t{0});
    std::fill_n(head, kHeadWords, 0u);
  }
  auto* const entries = reinterpret_cast<Entry*>(store.lines);
  for (uint64_t i = 0; i < uint64_t{kLineEntries} << store.line_bits; ++i) {
    if (!store.alive(entries[i].place >> kBlockBits)) entries[i] = {0, 0};
  }
}
