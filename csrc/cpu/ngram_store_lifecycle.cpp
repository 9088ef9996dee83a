// Functions for the owner of a store (api/numpy/store_tools.cpp): create, check, count and clear it, and copy its
// contents in pieces for a file.
#include <algorithm>
#include <cstring>
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
    if (!store.is_live(slot[kSlotSerial])) continue;
    if (store.fill(slot[kSlotSerial]) > slot[kSlotLength] + kOverlap) return kStoreFaultSlot;
    newest.push_back(slot[kSlotSerial]);
  }
  std::sort(newest.begin(), newest.end());
  return std::adjacent_find(newest.begin(), newest.end()) == newest.end() ? kStoreFaultNone : kStoreFaultSlot;
}

// The possible levels of an entry's gram, as bits.
uint32_t levels_of(const cpu::Store& store, const Entry* line, const Entry& entry) {
  const uint32_t serial = entry.position >> kBlockBits, offset = entry.position % kBlockTokens;
  const cpu::GramKeys keys = cpu::keys_before(store.text(serial) + offset, offset, scope_seed(store.scope(serial)));
  uint32_t levels = 0;
  for (uint32_t level = 0; level < keys.levels; ++level) {
    const bool matches = store.line(keys.values[level]) == line && (keys.values[level] & 0xffffffu) == entry.state >> 8;
    levels |= uint32_t{matches} << level;
  }
  return levels;
}

bool same_gram(const cpu::Store& store, const Entry& a, const Entry& b, uint32_t level) {
  const auto gram = [&](const Entry& entry) {
    return store.text(entry.position >> kBlockBits) + entry.position % kBlockTokens - ladder_ngram_length(level);
  };
  return store.scope(a.position >> kBlockBits) == store.scope(b.position >> kBlockBits) &&
         std::equal(gram(a), gram(a) + ladder_ngram_length(level), gram(b));
}

StoreFault check_line(const cpu::Store& store, const Entry* line) {
  uint32_t levels[kLineEntries] = {};
  for (uint32_t i = 0; i < kLineEntries; ++i) {
    const Entry& entry = line[i];
    const uint32_t serial = entry.position >> kBlockBits;
    const uint32_t next = store.header[kHeaderNextSerial];
    if (serial >= next) return kStoreFaultPlace;
    if (!store.is_live(serial)) {  // overwritten; entries of cleared text are removed
      if (serial != 0 && next - serial <= store.num_blocks) return kStoreFaultPlace;
      continue;
    }
    if (entry.position % kBlockTokens >= store.fill(serial)) return kStoreFaultPlace;
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

// The contents of a store in pieces, for its file. Only the written part of blocks and the used entries of lines are
// copied:
//
//   blocks  for each block: its head, its tokens, its bytes up to a whole word
//   lines   for each line with entries: line << 8 | bit mask of the used entries, then these entries
//   header  its words
//
// Steps continue between two pieces. So an entry may be newer than the copy of its block, and a block may have been
// reused since its copy. Unpacking leaves out what is inconsistent.

constexpr int64_t kPieceBlocks = 1024;
constexpr int64_t kPieceLines = 16384;
static_assert(kPieceBlocks * (kHeadWords + kBlockTokens + kByteWords) <= kStorePieceWords);
static_assert(kPieceLines * (1 + kLineWords) <= kStorePieceWords);
static_assert(kHeaderWords <= kStorePieceWords);

struct Pieces {
  int64_t blocks, lines;

  explicit Pieces(const cpu::Store& store)
      : blocks((store.num_blocks + kPieceBlocks - 1) / kPieceBlocks),
        lines(((int64_t{1} << store.line_bits) + kPieceLines - 1) / kPieceLines) {}
  int64_t count() const { return blocks + lines + 1; }
};

uint32_t byte_words(uint32_t fill) { return (fill + 3) / 4; }

uint32_t* pack_blocks(const cpu::Store& store, int64_t first, uint32_t* to) {
  const int64_t end = smaller<int64_t>(first + kPieceBlocks, store.num_blocks);
  for (int64_t i = first; i < end; ++i) {
    const uint32_t* head = store.heads + i * kHeadWords;
    if (head[kHeadSerial] == 0) continue;
    const auto block = static_cast<uint32_t>(i);
    const uint32_t fill = smaller(head[kHeadFill], kBlockTokens);
    to = std::copy_n(head, kHeadWords, to);
    std::memcpy(to, store.text(block), fill * sizeof(int32_t));
    to += fill;
    std::memcpy(to, store.outcomes(block), byte_words(fill) * sizeof(uint32_t));
    to += byte_words(fill);
  }
  return to;
}

uint32_t* pack_lines(const cpu::Store& store, int64_t first, uint32_t* to) {
  const int64_t end = smaller<int64_t>(first + kPieceLines, int64_t{1} << store.line_bits);
  const uint32_t oldest = cpu::oldest_position(store);
  for (int64_t i = first; i < end; ++i) {
    const auto* line = reinterpret_cast<const Entry*>(store.lines + i * kLineWords);
    uint32_t used = 0;
    for (uint32_t j = 0; j < kLineEntries; ++j) used |= uint32_t{line[j].position >= oldest} << j;
    if (used == 0) continue;
    *to++ = static_cast<uint32_t>(i) << kLineEntries | used;
    for (; used != 0; used &= used - 1) {
      const Entry& entry = line[__builtin_ctz(used)];
      *to++ = entry.state;
      *to++ = entry.position;
    }
  }
  return to;
}

bool unpack_blocks(const cpu::Store& store, const uint32_t* from, const uint32_t* end) {
  while (from != end) {
    if (end - from < kHeadWords) return false;
    const uint32_t serial = from[kHeadSerial], fill = from[kHeadFill];
    if (serial == 0 || serial >= kEndOfSerials || fill > kBlockTokens) return false;
    if (end - from < int64_t{kHeadWords} + fill + byte_words(fill)) return false;
    if (store.head(serial)[kHeadSerial] != 0) return false;
    std::copy_n(from, kHeadWords, store.head(serial));
    from += kHeadWords;
    std::memcpy(store.text(serial), from, fill * sizeof(int32_t));
    std::memcpy(store.outcomes(serial), from + fill, byte_words(fill) * sizeof(uint32_t));
    from += fill + byte_words(fill);
  }
  return true;
}

bool unpack_lines(const cpu::Store& store, const uint32_t* from, const uint32_t* end) {
  while (from != end) {
    const uint64_t line = *from >> kLineEntries;
    uint32_t used = *from++ % (1u << kLineEntries);
    if (line >> store.line_bits != 0 || end - from < 2 * __builtin_popcount(used)) return false;
    auto* const entries = reinterpret_cast<Entry*>(store.lines + line * kLineWords);
    for (; used != 0; used &= used - 1, from += 2) {
      const Entry entry{from[0], from[1]};
      const uint32_t serial = entry.position >> kBlockBits;
      const bool fits = store.is_live(serial) && entry.position % kBlockTokens < store.fill(serial);
      if (fits) entries[__builtin_ctz(used)] = entry;
    }
  }
  return true;
}

// Restores the serial numbers, the epoch and the statistics. Blocks that were reused after their copy are left out.
bool unpack_header(const cpu::Store& store, const uint32_t* from, const uint32_t* end) {
  if (end - from != kHeaderWords) return false;
  std::copy(from + kHeaderNextSerial, end, store.header + kHeaderNextSerial);
  store.header[kHeaderBusy] = 0;
  const uint32_t next = store.header[kHeaderNextSerial];
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    if (head[kHeadSerial] == 0 || head[kHeadSerial] + store.num_blocks >= next) continue;
    std::fill_n(head, kHeadWords, 0u);
    std::fill_n(store.text(i), kBlockTokens, 0);
    std::fill_n(store.outcomes(i), kBlockTokens, uint8_t{0});
  }
  return true;
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
    if (store.is_live(previous) && store.scope(previous) != store.scope(serial)) return kStoreFaultLink;
  }
  return kStoreFaultNone;
}

void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits, int64_t parts[6]) {
  const cpu::StoreParts layout = cpu::store_parts(num_slots, num_blocks, line_bits);
  const int64_t offsets[] = {layout.slots, layout.heads, layout.lines, layout.tokens, layout.bytes, layout.end};
  std::copy(std::begin(offsets), std::end(offsets), parts);
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

void ngram_npu_cpu_ngram_store_usage(const int32_t* words, int64_t num_words, int64_t usage[3]) {
  cpu::Store store;
  std::fill_n(usage, 3, 0);
  if (!open_to_read(words, num_words, &store)) return;
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    const uint32_t* head = store.heads + size_t{i} * kHeadWords;
    if (head[kHeadSerial] == 0) continue;
    usage[0] += int64_t{smaller(head[kHeadFill], kBlockTokens)} - smaller(head[kHeadFirst], head[kHeadFill]);
    ++usage[1];
  }
  for (uint32_t i = 0; i < store.num_slots; ++i) usage[2] += store.is_live(store.slot(i)[kSlotSerial]);
}

bool ngram_npu_cpu_ngram_store_take(int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(words, num_words, &store) && cpu::StoreUse::try_lock(store);
}

void ngram_npu_cpu_ngram_store_give_back(int32_t* words, int64_t num_words) {
  cpu::Store store;
  if (cpu::open_store(words, num_words, &store)) cpu::StoreUse::unlock(store);
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
    if (!store.is_live(entries[i].position >> kBlockBits)) entries[i] = {0, 0};
  }
}

int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(const_cast<int32_t*>(words), num_words, &store) ? Pieces(store).count() : 0;
}

int64_t ngram_npu_cpu_ngram_store_pack(int32_t* words, int64_t num_words, int64_t piece, uint32_t* to) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return 0;
  if (!cpu::StoreUse::try_lock(store, kCopying)) return -1;
  const Pieces pieces(store);
  uint32_t* end = to;
  if (piece < pieces.blocks) {
    end = pack_blocks(store, piece * kPieceBlocks, to);
  } else if (piece < pieces.blocks + pieces.lines) {
    end = pack_lines(store, (piece - pieces.blocks) * kPieceLines, to);
  } else {
    // Calls that wait for the lock or did not get it may write to the header at the same time.
    for (int64_t i = 0; i < kHeaderWords; ++i) *end++ = __atomic_load_n(store.header + i, __ATOMIC_RELAXED);
  }
  cpu::StoreUse::unlock(store);
  return end - to;
}

int32_t ngram_npu_cpu_ngram_store_unpack(int32_t* words, int64_t num_words, int64_t piece, const uint32_t* from,
                                         int64_t count) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return kStoreFaultHeader;
  const Pieces pieces(store);
  const uint32_t* const end = from + count;
  if (piece < pieces.blocks) return unpack_blocks(store, from, end) ? kStoreFaultNone : kStoreFaultPiece;
  if (piece < pieces.blocks + pieces.lines) return unpack_lines(store, from, end) ? kStoreFaultNone : kStoreFaultPiece;
  if (!unpack_header(store, from, end)) return kStoreFaultPiece;
  int64_t where = 0;
  return cpu::check_blocks(store, &where);
}
