// Layout of an index on the CPU. The tensor contains offsets and ids, no pointers: it may be copied or moved. Every id
// is clamped before it is used, so even with corrupt contents a kernel never accesses memory outside the tensor.
//
//   header   64 words
//   slots    num_slots x 48 words: a line of state, a line of directory root, a line for the pages of outcomes
//   owners   num_pages words: the slot that owns a page, or the next free page
//   pages    num_pages x 1024 words, from a multiple of 1024 words on
//
// A slot's table is an extendible hash table (docs/design/index.md). Its buckets are pages: 64 cache lines of 16
// entries. A page of depth d holds the entries with a prefix that starts with its d bits; a directory maps the first D
// >= d bits of a prefix to a page.
//
// An entry is one word. In a page of depth d, from the top:
//   fingerprint  14 - d bits  the bits of the prefix after its first d
//   level         3           n - min_n of its n-gram ("gram")
//   home          2           the line within its group of four at which the search for it starts
//   twice         1           whether the gram has occurred more than once
//   next        12 + d       position of the token after the recorded occurrence; 0: no entry
#pragma once

#include "core/common.h"

// Bits of the fingerprint that a probe compares. No result depends on it, since hits are verified against the row; test
// builds with 0 and 1 exercise the verification.
#ifndef NGRAM_INDEX_FINGERPRINT_BITS
#define NGRAM_INDEX_FINGERPRINT_BITS 14
#endif

// Small pages, and few bits for `next`: test builds in which a few hundred tokens reach all the states that a million
// tokens reach in the released build.
#ifndef NGRAM_INDEX_SMALL_PAGES
#define NGRAM_INDEX_SMALL_PAGES 0
#endif

namespace ngram_npu::index {

constexpr uint32_t kMagic = 0x32584e47;  // "GNX2"
constexpr int64_t kHeaderWords = 64;
constexpr int64_t kSlotWords = 48;
constexpr uint32_t kLineWords = 16;
constexpr uint32_t kGroupLines = 4;  // an entry that does not fit into its line goes to another line of 4g .. 4g+3
constexpr uint32_t kPageLines = NGRAM_INDEX_SMALL_PAGES ? 8 : 64;
constexpr int64_t kPageWords = kPageLines * kLineWords;
constexpr int kMaxLevels = 8;
constexpr uint32_t kPrefixBits = 14;
// For an entry in a page of depth 0. A page splits, full or not, when its row grows beyond what its entries can record.
// With this number of bits a page of text is full before that; with one bit less, many pages would split early.
constexpr uint32_t kNextBits = NGRAM_INDEX_SMALL_PAGES ? 6 : 12;
static_assert(kPrefixBits + 3 + 2 + 1 + kNextBits == (NGRAM_INDEX_SMALL_PAGES ? 26 : 32));
constexpr uint32_t kRootDepth = NGRAM_INDEX_SMALL_PAGES ? 2 : 4;      // 2^kRootDepth directory entries fit the slot
constexpr uint32_t kDirPageDepth = NGRAM_INDEX_SMALL_PAGES ? 7 : 10;  // 2^kDirPageDepth fill a page
static_assert(kPageWords == 1 << kDirPageDepth);
constexpr uint32_t kMaxDepth = NGRAM_INDEX_SMALL_PAGES ? kDirPageDepth + 4 : kPrefixBits - 1;
constexpr uint32_t kTailTokens = 8;
constexpr uint32_t kMaxIndexedTokens = (1u << (kNextBits + kMaxDepth)) - 1;  // longer rows are scanned
constexpr uint32_t kOutcomePageBits = kDirPageDepth + 2;                     // log2 of the bytes in a page
constexpr uint32_t kRootOutcomePages = 16;
constexpr uint32_t kMaxOutcomePages = (kMaxIndexedTokens >> kOutcomePageBits) + 1;
constexpr int64_t kMaxPages = int64_t{1} << 26;  // line numbers fit 32 bits
constexpr int64_t kMaxSlots = int64_t{1} << 28;

// Words of the header. The statistics wrap.
enum Header : int {
  kHeaderMagic,
  kHeaderSlots,
  kHeaderPages,
  kHeaderUnusedPage,  // pages from here on were never used
  kHeaderFreePage,    // head of the list of freed pages: id + 1, 0 if there is none
  kHeaderPagesInUse,
  kHeaderPagesPeak,
  kStatIndexed = 16,    // rows answered from the index
  kStatScanFull,        // rows scanned because the arena, or the row's table, was full
  kStatScanCatchUp,     // rows scanned because they were not caught up within the call's budget
  kStatScanOther,       // rows scanned: no such slot, too long, or full and indexed to the end
  kStatRebuildLength,   // slots rebuilt: the row is shorter than what was indexed
  kStatRebuildTokens,   // slots rebuilt: the row's tokens are not those that were indexed
  kStatRebuildOptions,  // slots rebuilt: min_n, max_n or match_policy differ
  kStatSplits,
  kStatDisabled,  // slots disabled because the arena, or the row's table, was full
  kHeaderEnd,
};

// Words of a slot. An all-zero slot is empty.
enum Slot : int {
  kSlotOptions,    // pack_options(); 0: empty
  kSlotLength,     // tokens indexed
  kSlotDepth,      // D, if kSlotPages > 0
  kSlotPages,      // pages in use, directories included; 0: no table
  kSlotDisabled,   // not 0: the row is scanned. Pages in use when the arena was full, or kTableTooLarge
  kSlotMarked,     // 0 between calls; append marks the slots of its batch
  kSlotCandidate,  // of a ladder: candidate for the next token, position << 5 | length of its match; 0: none
  kSlotOutcomePages,
  kSlotTail = 8,   // the last min(8, length) tokens indexed, the newest last
  kSlotRoot = 16,  // the directory (D <= 4), or the ids of its pages
  kSlotOutcomeRoot = 32,
};

constexpr uint32_t kOptionLadder = 1u << 17;
constexpr uint32_t kOptionOutcomes = 1u << 18;
static NGRAM_FN uint32_t pack_options(int64_t min_n, int64_t max_n, int32_t match_policy, bool ladder, bool outcomes) {
  return 0x1000000u | (ladder ? kOptionLadder : 0) | (outcomes ? kOptionOutcomes : 0) |
         static_cast<uint32_t>(match_policy) << 16 | static_cast<uint32_t>(max_n) << 8 | static_cast<uint32_t>(min_n);
}

// In kSlotDisabled: the row needs a table above the maximum size. It is scanned until the slot gets another row.
constexpr uint32_t kTableTooLarge = ~0u;

// Number of pages with page ids that `pages` pages of outcomes need.
static NGRAM_FN uint32_t outcome_directories(uint32_t pages) {
  return pages <= kRootOutcomePages ? 0 : (pages + (1u << kDirPageDepth) - 1) >> kDirPageDepth;
}

// A directory entry: page id << 4 | depth of the page.
static NGRAM_FN uint32_t dir_entry(uint32_t page, uint32_t depth) { return page << 4 | depth; }

// Fields of an entry; the shifts are defined for any depth of four bits.
static NGRAM_FN uint32_t next_mask(uint32_t depth) { return (1u << (kNextBits + depth)) - 1; }
static NGRAM_FN uint32_t twice_bit(uint32_t depth) { return 1u << (kNextBits + depth); }
static NGRAM_FN uint32_t home_shift(uint32_t depth) { return kNextBits + 1 + depth; }
static NGRAM_FN uint32_t level_shift(uint32_t depth) { return kNextBits + 3 + depth; }

// The bits that a probe compares: home, level, and NGRAM_INDEX_FINGERPRINT_BITS of the fingerprint.
static NGRAM_FN uint32_t probe_mask(uint32_t depth) {
  constexpr uint32_t kFingerprintBits = NGRAM_INDEX_FINGERPRINT_BITS;
  if (kFingerprintBits >= kPrefixBits) return ~0u << home_shift(depth);
  const uint32_t bits = smaller(kFingerprintBits, kPrefixBits - depth);
  return 0x1fu << home_shift(depth) | (bits > 0 ? ~0u << (32 - bits) : 0u);
}

// Where a gram's entry belongs, in one word: the entry's head in a page of depth 0, and below it the line within the
// page.
//   prefix 14 bits | level 3 | home 2 | 0 0 0 0 0 0 0 | line 6 (home are its last two bits)
using Key = uint32_t;
constexpr uint32_t kHeadBits = ~0u << (kNextBits + 1);

static NGRAM_FN uint32_t line_of(Key key) { return key & (kPageLines - 1); }
// The page's index in a directory of this depth.
static NGRAM_FN uint32_t dir_index(Key key, uint32_t dir_depth) {
  return static_cast<uint32_t>(static_cast<uint64_t>(key) << dir_depth >> 32);
}
// The gram's entry in a page of this depth, without `twice` and `next`.
static NGRAM_FN uint32_t entry_head(Key key, uint32_t depth) { return (key & kHeadBits) << depth; }

// The hash of a gram is a sum of products of its tokens, newest first, with these factors. The gram that is one token
// longer has one more product.
struct Factors {
  uint32_t values[kMaxNgram];
};
constexpr Factors make_factors() {
  Factors factors{};
  uint64_t state = 0;
  for (int64_t i = 0; i < kMaxNgram; ++i) {  // splitmix64
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    factors.values[i] = static_cast<uint32_t>(z >> 32) | 1u;
  }
  return factors;
}
constexpr Factors kFactors = make_factors();

// Word: uint32_t, or a vector of them.
template <class Word>
static NGRAM_FN void make_keys(const Word& sum, uint32_t level, Word* key) {
  Word x = sum + 0x9e3779b9u * (level + 1);
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  // Makes prefixes denser towards one end, about log2(1 + u), so that page loads differ by up to a factor of two. The
  // pages of a row, and of rows of equal length, then do not all split at the same time, and memory grows steadily.
  const Word u = x >> 16;
  const Word prefix = u + ((u * (0x10000u - u) >> 16) * 22610u >> 16);
  *key = prefix >> (16 - kPrefixBits) << (32 - kPrefixBits) | level << level_shift(0) |
         (x & (kGroupLines - 1)) << home_shift(0) | (x & (kPageLines - 1));
}

static NGRAM_FN Key make_key(uint32_t sum, uint32_t level) {
  Key key;
  make_keys(sum, level, &key);
  return key;
}

}  // namespace ngram_npu::index
