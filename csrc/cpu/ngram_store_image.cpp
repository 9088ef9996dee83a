// A store's contents in pieces, for its file: of blocks only what is written, of lines only the entries in use.
//
//   blocks  for each: its head, its tokens, its bytes up to a whole word
//   lines   for each with entries: line << 8 | which of the eight, then these
//   header  its words
//
// Steps go on between two pieces. So an entry may be newer than its block's copy, and a block may have been given out
// again since: what does not fit together is left out when the pieces are put back.
#include <algorithm>
#include <cstring>

#include "cpu/ngram_store.h"

using namespace ngram_npu;
using namespace ngram_npu::store;

namespace {

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
  const uint32_t oldest = cpu::oldest_place(store);
  for (int64_t i = first; i < end; ++i) {
    const auto* line = reinterpret_cast<const Entry*>(store.lines + i * kLineWords);
    uint32_t used = 0;
    for (uint32_t j = 0; j < kLineEntries; ++j) used |= uint32_t{line[j].place >= oldest} << j;
    if (used == 0) continue;
    *to++ = static_cast<uint32_t>(i) << kLineEntries | used;
    for (; used != 0; used &= used - 1) {
      const Entry& entry = line[__builtin_ctz(used)];
      *to++ = entry.state;
      *to++ = entry.place;
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
      const uint32_t serial = entry.place >> kBlockBits;
      const bool fits = store.alive(serial) && entry.place % kBlockTokens < store.fill(serial);
      if (fits) entries[__builtin_ctz(used)] = entry;
    }
  }
  return true;
}

// The numbers that go on, and the statistics. Blocks that were given out again after their copy are left out.
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

int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* words, int64_t num_words) {
  cpu::Store store;
  return cpu::open_store(const_cast<int32_t*>(words), num_words, &store) ? Pieces(store).count() : 0;
}

int64_t ngram_npu_cpu_ngram_store_pack(int32_t* words, int64_t num_words, int64_t piece, uint32_t* to) {
  cpu::Store store;
  if (!cpu::open_store(words, num_words, &store)) return 0;
  if (!cpu::StoreUse::take(store, kCopied)) return -1;
  const Pieces pieces(store);
  uint32_t* end = to;
  if (piece < pieces.blocks) {
    end = pack_blocks(store, piece * kPieceBlocks, to);
  } else if (piece < pieces.blocks + pieces.lines) {
    end = pack_lines(store, (piece - pieces.blocks) * kPieceLines, to);
  } else {
    // Calls that wait for the lock, or were refused it, write to the header meanwhile.
    for (int64_t i = 0; i < kHeaderWords; ++i) *end++ = __atomic_load_n(store.header + i, __ATOMIC_RELAXED);
  }
  cpu::StoreUse::give_back(store);
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
