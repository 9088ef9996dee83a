// Functions that create, check and clear a store, count its contents, and copy its contents in pieces for a file.
// api/numpy/store_tools.cpp calls these functions.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/ngram_store.h"

using namespace ngram_npu;
using namespace ngram_npu::store;

namespace {

// Opens a store that is only read.
bool open_for_reading(const int32_t* words, int64_t num_words, cpu::Store* store) {
  return cpu::open_store(const_cast<int32_t*>(words), num_words, store);
}

StoreFault check_slots(const cpu::Store& store, int64_t* location) {
  std::vector<uint32_t> newest_serials;
  for (uint32_t i = 0; i < store.num_slots; ++i) {
    *location = i;
    const uint32_t* slot = store.slot(i);
    if (!store.is_alive(slot[kSlotSerial])) continue;
    if (store.fill(slot[kSlotSerial]) > slot[kSlotLength] + kOverlap) return kStoreFaultSlot;
    newest_serials.push_back(slot[kSlotSerial]);
  }
  std::sort(newest_serials.begin(), newest_serials.end());
  return std::adjacent_find(newest_serials.begin(), newest_serials.end()) == newest_serials.end() ? kStoreFaultNone
                                                                                                  : kStoreFaultSlot;
}

// Bit i of the result is set if the entry may be the entry of an n-gram at level i.
uint32_t find_possible_levels(const cpu::Store& store, const Entry* line, const Entry& entry) {
  const uint32_t serial = entry.position >> kBlockBits, offset = entry.position % kBlockTokens;
  const cpu::NgramKeys keys =
      cpu::compute_ngram_keys(store.text(serial) + offset, offset, scope_seed(store.scope(serial)));
  uint32_t levels = 0;
  for (uint32_t level = 0; level < keys.levels; ++level) {
    const bool is_match =
        store.line(keys.values[level]) == line && (keys.values[level] & 0xffffffu) == entry.state >> 8;
    levels |= uint32_t{is_match} << level;
  }
  return levels;
}

// Whether two entries of this level have equal n-grams and equal scopes.
bool have_equal_ngrams(const cpu::Store& store, const Entry& a, const Entry& b, uint32_t level) {
  const auto find_ngram = [&](const Entry& entry) {
    return store.text(entry.position >> kBlockBits) + entry.position % kBlockTokens - ladder_ngram_length(level);
  };
  return store.scope(a.position >> kBlockBits) == store.scope(b.position >> kBlockBits) &&
         std::equal(find_ngram(a), find_ngram(a) + ladder_ngram_length(level), find_ngram(b));
}

StoreFault check_line(const cpu::Store& store, const Entry* line) {
  uint32_t levels[kLineEntries] = {};
  for (uint32_t i = 0; i < kLineEntries; ++i) {
    const Entry& entry = line[i];
    const uint32_t serial = entry.position >> kBlockBits;
    const uint32_t next_serial = store.header[kHeaderNextSerial];
    if (serial >= next_serial) return kStoreFaultPlace;
    if (!store.is_alive(serial)) {  // the block must have been replaced, because clearing text removes its entries
      if (serial != 0 && next_serial - serial <= store.num_blocks) return kStoreFaultPlace;
      continue;
    }
    if (entry.position % kBlockTokens >= store.fill(serial)) return kStoreFaultPlace;
    if ((entry.state & kMaxCount) > (entry.state >> 4 & kMaxCount) + 1) return kStoreFaultCounts;
    levels[i] = find_possible_levels(store, line, entry);
    if (levels[i] == 0) return kStoreFaultKey;
    for (uint32_t j = 0; j < i; ++j) {
      for (uint32_t level = 0; level < kLadderLevels; ++level) {
        const bool is_possible = (levels[i] & levels[j]) >> level & 1;
        if (is_possible && have_equal_ngrams(store, line[j], entry, level)) return kStoreFaultDuplicate;
      }
    }
  }
  return kStoreFaultNone;
}

StoreFault check_store(const cpu::Store& store, int64_t* location) {
  if (const StoreFault fault = cpu::check_blocks(store, location)) return fault;
  if (const StoreFault fault = check_slots(store, location)) return fault;
  for (uint64_t i = 0; i < uint64_t{1} << store.line_bits; ++i) {
    *location = static_cast<int64_t>(i);
    const auto* line = reinterpret_cast<const Entry*>(store.lines + i * kLineWords);
    if (const StoreFault fault = check_line(store, line)) return fault;
  }
  *location = 0;
  return kStoreFaultNone;
}

// The contents of a store are copied to its file in pieces. Only the written part of blocks and the used entries of
// lines are copied:
//
//   blocks  for each block: its head, its tokens, and its outcome bytes up to a whole word
//   lines   for each line with entries: line << 8 | bit mask of the used entries, then these entries
//   header  the words of the header
//
// Other calls use the store between two pieces. An entry may therefore be newer than the copy of its block, and a block
// may have been replaced since it was copied. Unpacking skips such entries and blocks.

constexpr int64_t kPieceBlocks = 1024;
constexpr int64_t kPieceLines = 16384;
static_assert(kPieceBlocks * (kHeadWords + kBlockTokens + kByteWords) <= kStorePieceWords);
static_assert(kPieceLines * (1 + kLineWords) <= kStorePieceWords);
static_assert(kHeaderWords <= kStorePieceWords);

// The numbers of pieces with blocks and with lines. One more piece has the header.
struct PieceCounts {
  int64_t num_block_pieces, num_line_pieces;

  explicit PieceCounts(const cpu::Store& store)
      : num_block_pieces((store.num_blocks + kPieceBlocks - 1) / kPieceBlocks),
        num_line_pieces(((int64_t{1} << store.line_bits) + kPieceLines - 1) / kPieceLines) {}
  int64_t total() const { return num_block_pieces + num_line_pieces + 1; }
};

// Number of words with the outcome bytes of `fill` tokens.
uint32_t count_byte_words(uint32_t fill) { return (fill + 3) / 4; }

uint32_t* pack_blocks(const cpu::Store& store, int64_t first, uint32_t* output) {
  const int64_t end = smaller<int64_t>(first + kPieceBlocks, store.num_blocks);
  for (int64_t i = first; i < end; ++i) {
    const uint32_t* head = store.heads + i * kHeadWords;
    if (head[kHeadSerial] == 0) continue;
    const auto block = static_cast<uint32_t>(i);
    const uint32_t fill = smaller(head[kHeadFill], kBlockTokens);
    output = std::copy_n(head, kHeadWords, output);
    std::memcpy(output, store.text(block), fill * sizeof(int32_t));
    output += fill;
    std::memcpy(output, store.outcomes(block), count_byte_words(fill) * sizeof(uint32_t));
    output += count_byte_words(fill);
  }
  return output;
}

uint32_t* pack_lines(const cpu::Store& store, int64_t first, uint32_t* output) {
  const int64_t end = smaller<int64_t>(first + kPieceLines, int64_t{1} << store.line_bits);
  const uint32_t oldest = cpu::oldest_position(store);
  for (int64_t i = first; i < end; ++i) {
    const auto* line = reinterpret_cast<const Entry*>(store.lines + i * kLineWords);
    uint32_t used_entries = 0;
    for (uint32_t j = 0; j < kLineEntries; ++j) used_entries |= uint32_t{line[j].position >= oldest} << j;
    if (used_entries == 0) continue;
    *output++ = static_cast<uint32_t>(i) << kLineEntries | used_entries;
    for (; used_entries != 0; used_entries &= used_entries - 1) {
      const Entry& entry = line[__builtin_ctz(used_entries)];
      *output++ = entry.state;
      *output++ = entry.position;
    }
  }
  return output;
}

// The unpack functions read the words [packed_words, end). They return false if these words are not valid.
bool unpack_blocks(const cpu::Store& store, const uint32_t* packed_words, const uint32_t* end) {
  while (packed_words != end) {
    if (end - packed_words < kHeadWords) return false;
    const uint32_t serial = packed_words[kHeadSerial], fill = packed_words[kHeadFill];
    if (serial == 0 || serial >= kEndOfSerials || fill > kBlockTokens) return false;
    if (end - packed_words < int64_t{kHeadWords} + fill + count_byte_words(fill)) return false;
    if (store.head(serial)[kHeadSerial] != 0) return false;
    std::copy_n(packed_words, kHeadWords, store.head(serial));
    packed_words += kHeadWords;
    std::memcpy(store.text(serial), packed_words, fill * sizeof(int32_t));
    std::memcpy(store.outcomes(serial), packed_words + fill, count_byte_words(fill) * sizeof(uint32_t));
    packed_words += fill + count_byte_words(fill);
  }
  return true;
}

bool unpack_lines(const cpu::Store& store, const uint32_t* packed_words, const uint32_t* end) {
  while (packed_words != end) {
    const uint64_t line = *packed_words >> kLineEntries;
    uint32_t used_entries = *packed_words++ % (1u << kLineEntries);
    if (line >> store.line_bits != 0 || end - packed_words < 2 * __builtin_popcount(used_entries)) return false;
    auto* const entries = reinterpret_cast<Entry*>(store.lines + line * kLineWords);
    for (; used_entries != 0; used_entries &= used_entries - 1, packed_words += 2) {
      const Entry entry{packed_words[0], packed_words[1]};
      const uint32_t serial = entry.position >> kBlockBits;
      const bool has_text = store.is_alive(serial) && entry.position % kBlockTokens < store.fill(serial);
      if (has_text) entries[__builtin_ctz(used_entries)] = entry;
    }
  }
  return true;
}

// Restores the serial numbers, the epoch and the statistics, and removes blocks that were replaced after their copy.
bool unpack_header(const cpu::Store& store, const uint32_t* packed_words, const uint32_t* end) {
  if (end - packed_words != kHeaderWords) return false;
  std::copy(packed_words + kHeaderNextSerial, end, store.header + kHeaderNextSerial);
  store.header[kHeaderLock] = 0;
  const uint32_t next_serial = store.header[kHeaderNextSerial];
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    if (head[kHeadSerial] == 0 || head[kHeadSerial] + store.num_blocks >= next_serial) continue;
    std::fill_n(head, kHeadWords, 0u);
    std::fill_n(store.text(i), kBlockTokens, 0);
    std::fill_n(store.outcomes(i), kBlockTokens, uint8_t{0});
  }
  return true;
}

// Zeroes the blocks whose serial number meets the condition, and removes their entries.
template <class Condition>
void clear_blocks(const cpu::Store& store, Condition is_cleared) {
  ++store.header[kHeaderEpoch];
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    const uint32_t serial = head[kHeadSerial];
    if (serial == 0 || !is_cleared(serial)) continue;
    std::fill_n(store.text(i), kBlockTokens, 0);
    std::fill_n(store.outcomes(i), kBlockTokens, uint8_t{0});
    std::fill_n(head, kHeadWords, 0u);
  }
  auto* const entries = reinterpret_cast<Entry*>(store.lines);
  for (uint64_t i = 0; i < uint64_t{kLineEntries} << store.line_bits; ++i) {
    if (!store.is_alive(entries[i].position >> kBlockBits)) entries[i] = {0, 0};
  }
}

// The number that renumbering has subtracted from the serial numbers since the store was created.
int64_t total_serial_offset(const cpu::Store& store) {
  return int64_t{store.header[kStatRenumberings]} * max_serial_offset(store.num_blocks);
}

}  // namespace

StoreFault cpu::check_blocks(const Store& store, int64_t* location) {
  const uint32_t next_serial = store.header[kHeaderNextSerial];
  if (next_serial == 0 || next_serial > kEndOfSerials) return kStoreFaultHeader;
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    *location = i;
    const uint32_t* head = store.heads + size_t{i} * kHeadWords;
    const uint32_t serial = head[kHeadSerial];
    if (serial == 0) continue;
    if (store.block_of(serial) != i || serial >= next_serial || next_serial - serial > store.num_blocks)
      return kStoreFaultBlock;
    if (head[kHeadFill] > kBlockTokens || head[kHeadFirst] > smaller(head[kHeadFill], kOverlap)) {
      return kStoreFaultFill;
    }
    const uint32_t previous_serial = head[kHeadPrevious];
    if (previous_serial >= serial) return kStoreFaultLink;
    if (store.is_alive(previous_serial) && store.scope(previous_serial) != store.scope(serial)) return kStoreFaultLink;
  }
  return kStoreFaultNone;
}

void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits, int64_t parts[6]) {
  const cpu::StoreParts layout = cpu::compute_store_parts(num_slots, num_blocks, line_bits);
  const int64_t offsets[] = {layout.slots, layout.heads, layout.lines, layout.tokens, layout.bytes, layout.end};
  std::copy(std::begin(offsets), std::end(offsets), parts);
}

int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots, int64_t num_blocks,
                                       int64_t line_bits, uint32_t visibility) {
  const cpu::StoreParts parts = cpu::compute_store_parts(num_slots, num_blocks, line_bits);
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

int32_t ngram_npu_cpu_ngram_store_check(const int32_t* words, int64_t num_words, int64_t* location) {
  cpu::Store store;
  *location = 0;
  return open_for_reading(words, num_words, &store) ? check_store(store, location) : kStoreFaultHeader;
}

void ngram_npu_cpu_ngram_store_usage(const int32_t* words, int64_t num_words, int64_t usage[3]) {
  cpu::Store store;
  std::fill_n(usage, 3, 0);
  if (!open_for_reading(words, num_words, &store)) return;
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    const uint32_t* head = store.heads + size_t{i} * kHeadWords;
    if (head[kHeadSerial] == 0) continue;
    usage[0] += int64_t{smaller(head[kHeadFill], kBlockTokens)} - smaller(head[kHeadFirst], head[kHeadFill]);
    ++usage[1];
  }
  for (uint32_t i = 0; i < store.num_slots; ++i) usage[2] += store.is_alive(store.slot(i)[kSlotSerial]);
}

bool ngram_npu_cpu_ngram_store_lock(int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(words, num_words, &store) && cpu::StoreLock::try_lock(store);
}

void ngram_npu_cpu_ngram_store_unlock(int32_t* words, int64_t num_words) {
  cpu::Store store;
  if (cpu::open_store(words, num_words, &store)) cpu::StoreLock::unlock(store);
}

void ngram_npu_cpu_ngram_store_clear(int32_t* words, int64_t num_words, const int64_t* scope) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return;
  clear_blocks(
      store, [&](uint32_t serial) { return scope == nullptr || store.scope(serial) == static_cast<uint64_t>(*scope); });
}

int64_t ngram_npu_cpu_ngram_store_mark_update(int32_t* words, int64_t num_words) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return 0;
  cpu::TokenInserter inserter(store);
  for (uint32_t i = 0; i < store.num_slots; ++i) cpu::close_slot(store, i, &inserter);
  return total_serial_offset(store) + store.header[kHeaderNextSerial];
}

void ngram_npu_cpu_ngram_store_drop(int32_t* words, int64_t num_words, int64_t mark) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return;
  const int64_t end = mark - total_serial_offset(store);
  clear_blocks(store, [&](uint32_t serial) { return serial < end; });
}

int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(const_cast<int32_t*>(words), num_words, &store) ? PieceCounts(store).total() : 0;
}

int64_t ngram_npu_cpu_ngram_store_pack(int32_t* words, int64_t num_words, int64_t piece, uint32_t* output) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return 0;
  if (!cpu::StoreLock::try_lock(store, kCopying)) return -1;
  const PieceCounts pieces(store);
  uint32_t* end = output;
  if (piece < pieces.num_block_pieces) {
    end = pack_blocks(store, piece * kPieceBlocks, output);
  } else if (piece < pieces.num_block_pieces + pieces.num_line_pieces) {
    end = pack_lines(store, (piece - pieces.num_block_pieces) * kPieceLines, output);
  } else {
    // Calls that wait for the lock, or that skip the store, may write to the header at the same time.
    for (int64_t i = 0; i < kHeaderWords; ++i) *end++ = __atomic_load_n(store.header + i, __ATOMIC_RELAXED);
  }
  cpu::StoreLock::unlock(store);
  return end - output;
}

int32_t ngram_npu_cpu_ngram_store_unpack(int32_t* words, int64_t num_words, int64_t piece, const uint32_t* packed_words,
                                         int64_t count) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return kStoreFaultHeader;
  const PieceCounts pieces(store);
  const uint32_t* const end = packed_words + count;
  if (piece < pieces.num_block_pieces)
    return unpack_blocks(store, packed_words, end) ? kStoreFaultNone : kStoreFaultPiece;
  if (piece < pieces.num_block_pieces + pieces.num_line_pieces)
    return unpack_lines(store, packed_words, end) ? kStoreFaultNone : kStoreFaultPiece;
  if (!unpack_header(store, packed_words, end)) return kStoreFaultPiece;
  int64_t location = 0;
  return cpu::check_blocks(store, &location);
}
