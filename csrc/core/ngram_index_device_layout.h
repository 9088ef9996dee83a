// Layout of an index on a GPU: one hash table for all slots, which thousands of threads fill at once. The CPU has
// another layout (ngram_index_layout.h). The tensor contains numbers, no pointers. Every number is checked where it is
// used, so that even corrupt contents never lead a kernel outside the tensor.
//
//   header       64 words
//   slots        num_slots x 16 words: the state of each slot's row
//   generations  num_slots words, padded to a multiple of 32 words
//   buckets      num_buckets x 16 entries of 64 bits, at a multiple of 128 bytes from the tensor's start
//
// An entry records where an n-gram ("gram") of a slot occurs. A gram can be in either of two buckets. From the top:
//   level         3 bits   n - min_n
//   fingerprint   9
//   tenant       24        generation and slot
//   next         28        the place of the token after the recorded occurrence; the whole word is 0: no entry
// Emptying a slot changes its generation. Its old entries are then dead, and new entries overwrite them; there is no
// cleanup pass. All-zero words after a valid header are an empty index.
#pragma once

#include "core/common.h"

namespace ngram_npu::device_index {

constexpr uint32_t kMagic = 0x31444e47;  // "GND1"
constexpr int64_t kHeaderWords = 64;
constexpr int64_t kSlotWords = 16;
constexpr int64_t kBucketWords = 32;
constexpr int64_t kBucketEntries = 16;
constexpr uint32_t kTailTokens = 8;
constexpr uint32_t kNextBits = 28;
constexpr uint32_t kTenantBits = 24;
constexpr uint32_t kFingerprintBits = 9;
constexpr uint32_t kMaxIndexedTokens = (1u << kNextBits) - 2;  // longer rows are scanned
constexpr uint32_t kMaxSlotBits = 20;
constexpr int64_t kMaxSlots = int64_t{1} << kMaxSlotBits;
constexpr int64_t kMaxBuckets = int64_t{1} << 28;

// Words of the header. Counters wrap.
enum Header : int {
  kHeaderMagic,
  kHeaderSlots,
  kHeaderBuckets,
  kHeaderSlotBits,         // bits of a slot's number
  kHeaderEntries,          // entries of all slots, without those of former generations
  kHeaderFingerprintBits,  // bits of a fingerprint and of a generation in use. No result depends on them, since hits
  kHeaderGenerationBits,   // are verified against the row; tests use few bits to exercise the verification
  kStatIndexed = 16,       // rows answered from the index
  kStatScanFull,           // rows scanned because the table was full
  kStatScanCatchUp,        // rows scanned because a step could not index all of their tokens
  kStatScanOther,          // rows scanned because there is no such slot, or the row is too long
  kStatRebuildLength,      // slots emptied: the row is shorter than what was indexed
  kStatRebuildTokens,      // slots emptied: the row's tokens are not those that were indexed
  kStatRebuildOptions,     // slots emptied: min_n, max_n or match_policy differ
  kStatGivenUp,            // slots given up because the table was full
};

// Words of a slot. An all-zero slot is empty.
enum Slot : int {
  kSlotOptions,   // pack_options(); 0: empty
  kSlotIndexed,   // the ends below this one are indexed
  kSlotHeld,      // entries
  kSlotGivenUp,   // entries held when the table was full, otherwise 0; the row is scanned until there is room again
  kSlotTail = 8,  // the last min(8, indexed) tokens indexed, the newest last
};

NGRAM_FN uint32_t pack_options(int64_t min_n, int64_t max_n, int32_t match_policy) {
  return 0x1000000u | static_cast<uint32_t>(match_policy) << 16 | static_cast<uint32_t>(max_n) << 8 |
         static_cast<uint32_t>(min_n);
}

NGRAM_FN int64_t words_before_buckets(int64_t num_slots) {
  const int64_t words = kHeaderWords + num_slots * (kSlotWords + 1);
  return (words + kBucketWords - 1) / kBucketWords * kBucketWords;
}

// The words of an index of that size; 0 if that is too large.
NGRAM_FN int64_t words_for(int64_t num_slots, int64_t num_buckets) {
  if (num_slots < 1 || num_buckets < 1 || num_slots > kMaxSlots || num_buckets > kMaxBuckets) return 0;
  return words_before_buckets(num_slots) + num_buckets * kBucketWords;
}

// The tensor's parts; num_slots is 0 if the header does not match the tensor.
struct Table {
  uint32_t* header;
  uint32_t* slots;
  uint32_t* generations;
  unsigned long long* entries;
  uint32_t num_slots;
  uint32_t num_buckets;
  uint32_t slot_bits;
  uint32_t fingerprint_mask;
  uint32_t generation_mask;

  NGRAM_FN bool has(int64_t slot) const { return slot >= 0 && slot < num_slots; }
  NGRAM_FN uint32_t* slot(uint32_t id) const { return slots + static_cast<int64_t>(id) * kSlotWords; }
  NGRAM_FN int64_t capacity() const { return num_buckets * kBucketEntries; }
  NGRAM_FN uint32_t tenant(uint32_t id, uint32_t generation) const {
    return (generation & generation_mask) << slot_bits | id;
  }
};

NGRAM_FN Table open_table(int32_t* index, int64_t words) {
  Table table{};
  // 64-bit entries need 8-byte alignment. Without a usable table all rows are scanned.
  if (words < kHeaderWords || reinterpret_cast<uintptr_t>(index) % sizeof(unsigned long long) != 0) return table;
  uint32_t* base = reinterpret_cast<uint32_t*>(index);
  const int64_t num_slots = base[kHeaderSlots];
  const int64_t num_buckets = base[kHeaderBuckets];
  const int64_t needed = words_for(num_slots, num_buckets);
  if (base[kHeaderMagic] != kMagic || needed == 0 || needed > words) return table;
  if (base[kHeaderSlotBits] > kMaxSlotBits || num_slots > int64_t{1} << base[kHeaderSlotBits]) return table;
  table.header = base;
  table.slots = base + kHeaderWords;
  table.generations = table.slots + num_slots * kSlotWords;
  table.entries = reinterpret_cast<unsigned long long*>(base + words_before_buckets(num_slots));
  table.num_slots = static_cast<uint32_t>(num_slots);
  table.num_buckets = static_cast<uint32_t>(num_buckets);
  table.slot_bits = base[kHeaderSlotBits];
  table.fingerprint_mask = (1u << smaller(base[kHeaderFingerprintBits], kFingerprintBits)) - 1;
  table.generation_mask = (1u << smaller(base[kHeaderGenerationBits], kTenantBits - table.slot_bits)) - 1;
  return table;
}

// The hash of a gram. Tokens are added one by one, newest first, so that a gram one longer adds one token.
struct GramHash {
  uint64_t sum = 0;
  uint64_t power = 1;

  NGRAM_FN void take(int32_t token) {
    sum += power * static_cast<uint32_t>(token);
    power *= 0xd1342543de82ef95u;
  }
};

NGRAM_FN GramHash hash_gram(const int32_t* tokens, uint32_t end, uint32_t n) {
  GramHash hash;
  for (uint32_t j = 0; j < n; ++j) hash.take(tokens[end - j]);
  return hash;
}

// The place of a gram: the head of its entry (all bits but `next`), and its two buckets.
struct Place {
  uint64_t head;
  uint32_t bucket[2];
};

// Equal grams of different slots get different places, because requests often begin with the same text.
NGRAM_FN Place place_of(const Table& table, const GramHash& hash, uint32_t slot, uint32_t tenant, uint32_t level) {
  uint64_t h = hash.sum + (uint64_t{slot} * kMaxIndexSpan + level + 1) * 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
  h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
  h ^= h >> 33;
  const uint32_t high = static_cast<uint32_t>(h >> 32), low = static_cast<uint32_t>(h);
  Place place;
  place.bucket[0] = static_cast<uint32_t>(uint64_t{high} * table.num_buckets >> 32);
  place.bucket[1] = static_cast<uint32_t>(uint64_t{low} * table.num_buckets >> 32);
  // The bucket number uses the upper bits of `high`.
  place.head = (uint64_t{level} << kFingerprintBits | (high & table.fingerprint_mask)) << kTenantBits | tenant;
  return place;
}

NGRAM_FN uint64_t make_entry(uint64_t head, uint32_t end) { return head << kNextBits | (end + 1); }
NGRAM_FN uint64_t head_of(uint64_t entry) { return entry >> kNextBits; }
NGRAM_FN uint32_t tenant_of(uint64_t entry) {
  return static_cast<uint32_t>(entry >> kNextBits) & ((1u << kTenantBits) - 1);
}
NGRAM_FN uint32_t level_of(uint64_t entry) { return static_cast<uint32_t>(entry >> 61); }
// The end that an entry records; a huge number for the word 0.
NGRAM_FN uint32_t end_of(uint64_t entry) { return (static_cast<uint32_t>(entry) & ((1u << kNextBits) - 1)) - 1; }

// Whether an entry belongs to no current slot, so that another entry may overwrite it.
NGRAM_FN bool is_dead(const Table& table, uint64_t entry, const volatile uint32_t* generations) {
  const uint32_t tenant = tenant_of(entry);
  const uint32_t slot = tenant & ((1u << table.slot_bits) - 1);
  return slot >= table.num_slots || table.tenant(slot, generations[slot]) != tenant;
}

// Whether a slot given up may try again: the table has room for 1.25 times the entries that it held.
NGRAM_FN bool has_room(const Table& table, uint32_t entries, uint32_t held) {
  return entries + static_cast<int64_t>(held) / 4 * 5 + kBucketEntries < table.capacity() / 4 * 3;
}

}  // namespace ngram_npu::device_index
