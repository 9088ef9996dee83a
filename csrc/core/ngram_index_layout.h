// Layout of an index on the CPU. The tensor contains offsets, page ids and slot ids, but no pointers, so it may be
// copied or moved. Page ids are clamped before they are used, so even with corrupt contents a kernel never accesses
// memory outside the tensor.
//
//   header   64 words
//   slots    num_slots x 48 words: a line of state, a line for the root of the directory, a line for the outcome pages
//   owners   num_pages words: for each page, the slot that owns it or the next free page
//   pages    num_pages x 1024 words, starting at a multiple of 1024 words
//
// A slot's table is an extendible hash table (docs/design/index.md). Its buckets are pages: 64 cache lines of 16
// entries. The key of an n-gram begins with a prefix of 14 bits. The keys of a page of depth d have the same first d
// bits; the directory maps the first D >= d bits of a key to a page.
//
// An entry is one word. In a page of depth d, the entry consists of, from the most significant bit:
//   fingerprint  14 - d bits  the last 14 - d bits of the prefix
//   level         3           index of the n-gram's length: n - min_n; with a ladder log2(n), 0 to 4
//   home          2           the line, within a group of four lines, at which the search for the entry starts
//   repeated      1           whether the n-gram has occurred more than once
//   next         12 + d       position of the token after the recorded occurrence; 0: no entry
#pragma once

#include "core/common.h"

// Number of fingerprint bits that a probe compares. No result depends on this number, because hits are verified against
// the row; test builds with 0 and 1 bits exercise the verification.
#ifndef NGRAM_INDEX_FINGERPRINT_BITS
#define NGRAM_INDEX_FINGERPRINT_BITS 14
#endif

// Test builds use small pages and few bits for `next`, so that a few hundred tokens reach all the states that a million
// tokens reach in the released build.
#ifndef NGRAM_INDEX_SMALL_PAGES
#define NGRAM_INDEX_SMALL_PAGES 0
#endif

namespace ngram_npu::index {

constexpr uint32_t kMagic = 0x32584e47;  // "GNX2"
constexpr int64_t kHeaderWords = 64;
constexpr int64_t kSlotWords = 48;
constexpr uint32_t kLineWords = 16;
constexpr uint32_t kGroupLines = 4;  // an entry that does not fit into its home line goes to another line of the group
constexpr uint32_t kPageLines = NGRAM_INDEX_SMALL_PAGES ? 8 : 64;
constexpr int64_t kPageWords = kPageLines * kLineWords;
constexpr int kMaxLevels = 8;
constexpr uint32_t kPrefixBits = 14;
// Number of bits of `next` in a page of depth 0. A page splits when it is full, or when the row becomes longer than
// `next` can represent. With 12 bits, most pages with n-grams of text split because they are full. With 11 bits, many
// would split before they are full, because of the row's length.
constexpr uint32_t kNextBits = NGRAM_INDEX_SMALL_PAGES ? 6 : 12;
static_assert(kPrefixBits + 3 + 2 + 1 + kNextBits == (NGRAM_INDEX_SMALL_PAGES ? 26 : 32));
constexpr uint32_t kRootDepth = NGRAM_INDEX_SMALL_PAGES ? 2 : 4;         // a slot has space for 2^4 directory entries
constexpr uint32_t kPageEntriesLog2 = NGRAM_INDEX_SMALL_PAGES ? 7 : 10;  // a page has space for 2^10 entries
static_assert(kPageWords == 1 << kPageEntriesLog2);
constexpr uint32_t kMaxDepth = NGRAM_INDEX_SMALL_PAGES ? kPageEntriesLog2 + 4 : kPrefixBits - 1;
constexpr uint32_t kTailTokens = 8;  // number of indexed tokens that a slot stores to detect changes of the row
constexpr uint32_t kMaxIndexedTokens = (1u << (kNextBits + kMaxDepth)) - 1;  // longer rows are scanned
constexpr uint32_t kOutcomePageBits = kPageEntriesLog2 + 2;                  // log2 of the number of bytes in a page
constexpr uint32_t kRootOutcomePages = 16;
constexpr uint32_t kMaxOutcomePages = (kMaxIndexedTokens >> kOutcomePageBits) + 1;
constexpr int64_t kMaxPages = int64_t{1} << 26;  // so that the index of a line fits into 32 bits
constexpr int64_t kMaxSlots = int64_t{1} << 28;

// Words of the header. The statistics wrap.
enum Header : int {
  kHeaderMagic,
  kHeaderSlots,
  kHeaderPages,
  kHeaderUnusedPage,  // id of the first page that was never used; all later pages are unused too
  kHeaderFreePage,    // head of the list of freed pages: id + 1, 0 if there is none
  kHeaderPagesInUse,
  kHeaderPagesPeak,     // maximum of kHeaderPagesInUse
  kStatIndexed = 16,    // rows looked up in the index
  kStatScanFull,        // rows scanned because all pages were in use, or the row's table had its maximum size
  kStatScanCatchUp,     // rows scanned because a call may index only a limited number of tokens
  kStatScanOther,       // rows scanned because they had no slot, were too long, or all of their tokens were already
                        // indexed: without a ladder, the lookup takes place while the last token is indexed
  kStatRebuildLength,   // slots rebuilt because the row had fewer tokens than the slot had indexed
  kStatRebuildTokens,   // slots rebuilt because the row's tokens differed from those that the slot had indexed
  kStatRebuildOptions,  // slots rebuilt because the options (pack_options) differed
  kStatSplits,
  kStatDisabled,  // slots disabled because all pages were in use, or the row's table had its maximum size
  kHeaderEnd,
};

// Words of a slot. An all-zero slot is empty.
enum Slot : int {
  kSlotOptions,    // pack_options(); 0: empty
  kSlotLength,     // number of indexed tokens
  kSlotDepth,      // D, if kSlotPages > 0
  kSlotPages,      // pages in use, directories included; 0: no table
  kSlotDisabled,   // 0: enabled; otherwise the row is scanned, and the value is the number of pages that the slot had
                   // when all pages were in use, or kTableTooLarge
  kSlotMark,       // 0 between calls; ngram_index_append_ sets it to 1 to detect slots that occur twice in a batch
  kSlotCandidate,  // with a ladder, the candidate for the next token: position << 5 | match length; 0: no candidate
  kSlotOutcomePages,      // number of outcome pages
  kSlotTail = 8,          // the last min(8, length) tokens indexed; the newest token is in the last word
  kSlotRoot = 16,         // the directory (D <= 4), or the ids of the directory's pages
  kSlotOutcomeRoot = 32,  // the ids of the outcome pages, or of the pages that contain these ids
};

constexpr uint32_t kOptionLadder = 1u << 17;
constexpr uint32_t kOptionOutcomes = 1u << 18;
constexpr uint32_t kOptionsSet = 1u << 24;  // so that options are never 0, which means an empty slot
static NGRAM_FN uint32_t pack_options(int64_t min_n, int64_t max_n, int32_t match_policy, bool ladder, bool outcomes) {
  return kOptionsSet | (ladder ? kOptionLadder : 0) | (outcomes ? kOptionOutcomes : 0) |
         static_cast<uint32_t>(match_policy) << 16 | static_cast<uint32_t>(max_n) << 8 | static_cast<uint32_t>(min_n);
}

// Value of kSlotDisabled if the row's table would be too large. The row is scanned until the slot gets another row.
constexpr uint32_t kTableTooLarge = ~0u;

// Number of directory pages for the ids of this number of outcome pages; 0 if the slot has space for the ids.
static NGRAM_FN uint32_t count_outcome_directories(uint32_t pages) {
  return pages <= kRootOutcomePages ? 0 : (pages + (1u << kPageEntriesLog2) - 1) >> kPageEntriesLog2;
}

// A directory entry: page id << 4 | depth of the page.
static NGRAM_FN uint32_t make_dir_entry(uint32_t page, uint32_t depth) { return page << 4 | depth; }

// Fields of an entry. The shift counts are below 32 for every 4-bit depth, so that a corrupt depth is harmless.
static NGRAM_FN uint32_t next_mask(uint32_t depth) { return (1u << (kNextBits + depth)) - 1; }
static NGRAM_FN uint32_t repeated_bit(uint32_t depth) { return 1u << (kNextBits + depth); }
static NGRAM_FN uint32_t home_shift(uint32_t depth) { return kNextBits + 1 + depth; }
static NGRAM_FN uint32_t level_shift(uint32_t depth) { return kNextBits + 3 + depth; }

// The bits that a probe compares: home, level, and NGRAM_INDEX_FINGERPRINT_BITS of the fingerprint.
static NGRAM_FN uint32_t probe_mask(uint32_t depth) {
  constexpr uint32_t kFingerprintBits = NGRAM_INDEX_FINGERPRINT_BITS;
  if (kFingerprintBits >= kPrefixBits) return ~0u << home_shift(depth);
  const uint32_t bits = smaller(kFingerprintBits, kPrefixBits - depth);
  return 0x1fu << home_shift(depth) | (bits > 0 ? ~0u << (32 - bits) : 0u);
}

// The key of an n-gram determines the page and line of the n-gram's entry:
//   bits 31-13  prefix 14 bits, level 3, home 2: the entry_head() in a page of depth 0
//   bits 12-6   0
//   bits 5-0    home line: the line of the page at which the search starts; `home` is equal to its last two bits
using Key = uint32_t;
constexpr uint32_t kHeadBits = ~0u << (kNextBits + 1);

static NGRAM_FN uint32_t line_of(Key key) { return key & (kPageLines - 1); }
// The index of the key's page in a directory of this depth.
static NGRAM_FN uint32_t dir_index(Key key, uint32_t dir_depth) {
  return static_cast<uint32_t>(static_cast<uint64_t>(key) << dir_depth >> 32);
}
// The head of the key's entry in a page of this depth: the entry without `repeated` and `next`.
static NGRAM_FN uint32_t entry_head(Key key, uint32_t depth) { return (key & kHeadBits) << depth; }

// The hash of an n-gram is the sum over j of (token j, counted from the n-gram's end; 0 is the last token) * factor j.
// The hash of the n-gram that is one token longer has one more product.
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

// Computes the keys of n-grams from their hashes and level. Word is uint32_t or a vector of uint32_t.
template <class Word>
static NGRAM_FN void make_keys(const Word& hashes, uint32_t level, Word* keys) {
  Word x = hashes + 0x9e3779b9u * (level + 1);
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  // Maps u / 2^16 to about log2(1 + u / 2^16), so that the number of entries per page varies by up to a factor of two.
  // The pages of a row, and of rows of equal length, then do not all split at the same time, and memory grows steadily.
  const Word u = x >> 16;
  const Word prefix = u + ((u * (0x10000u - u) >> 16) * 22610u >> 16);
  *keys = prefix >> (16 - kPrefixBits) << (32 - kPrefixBits) | level << level_shift(0) |
          (x & (kGroupLines - 1)) << home_shift(0) | (x & (kPageLines - 1));
}

static NGRAM_FN Key make_key(uint32_t hash, uint32_t level) {
  Key key;
  make_keys(hash, level, &key);
  return key;
}

}  // namespace ngram_npu::index
