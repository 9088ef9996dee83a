#include "host/device_index.h"

#include <cstring>
#include <vector>

#include "core/lookup_rules.h"
#include "core/ngram_index_device_layout.h"

namespace ngram_npu::host {

using namespace device_index;

namespace {

Table open_readonly(const int32_t* index, int64_t words) { return open_table(const_cast<int32_t*>(index), words); }

// Whether the generation number has wrapped, so that entries of an old generation look like current ones.
bool has_wrapped(const Table& table, uint32_t slot) { return table.generations[slot] > table.generation_mask; }

bool is_other_number(const Table& table, uint32_t slot, uint32_t held, uint32_t counted) {
  return has_wrapped(table, slot) ? counted < held : counted != held;
}

Place place_at(const Table& table, uint32_t slot, const int32_t* tokens, uint32_t end, uint32_t n, uint32_t level) {
  return place_of(table, hash_gram(tokens, end, n), slot, table.tenant(slot, table.generations[slot]), level);
}

bool same(const int32_t* tokens, uint32_t a, uint32_t b, uint32_t n) {
  return std::memcmp(tokens + a + 1 - n, tokens + b + 1 - n, n * sizeof *tokens) == 0;
}

// Unpacks a slot's options; false if no operator writes such options.
bool unpack(uint32_t options, uint32_t* min_n, uint32_t* max_n, bool* latest) {
  *min_n = options & 0xffu;
  *max_n = options >> 8 & 0xffu;
  *latest = (options >> 16 & 1u) != 0;
  return *min_n >= 1 && *max_n >= *min_n && *max_n <= kMaxNgram && *max_n - *min_n < kMaxIndexSpan;
}

}  // namespace

int64_t device_index_words(int64_t num_slots, int64_t num_buckets) { return words_for(num_slots, num_buckets); }

int64_t device_index_buckets(int64_t tokens, int64_t min_n, int64_t max_n) {
  if (tokens < 0 || min_n < 1 || max_n < min_n || max_n - min_n >= kMaxIndexSpan) return 0;
  // For a load of 0.8. With two buckets of 16 per gram no pair is full at this load, even with 2^23 buckets.
  constexpr int64_t kTenBuckets = kBucketEntries * 8;
  const int64_t levels = 10 * (max_n - min_n + 1);
  return smaller(tokens / kTenBuckets * levels + tokens % kTenBuckets * levels / kTenBuckets + 2, kMaxBuckets);
}

bool device_index_init(int32_t* header, int64_t num_slots, int64_t num_buckets, int32_t fingerprint_bits,
                       int32_t generation_bits) {
  if (words_for(num_slots, num_buckets) == 0) return false;
  int32_t slot_bits = 0;
  while (int64_t{1} << slot_bits < num_slots) ++slot_bits;
  header[kHeaderMagic] = static_cast<int32_t>(kMagic);
  header[kHeaderSlots] = static_cast<int32_t>(num_slots);
  header[kHeaderBuckets] = static_cast<int32_t>(num_buckets);
  header[kHeaderSlotBits] = slot_bits;
  header[kHeaderFingerprintBits] = fingerprint_bits;
  header[kHeaderGenerationBits] = generation_bits;
  return true;
}

IndexFault check_device_index(const int32_t* index, int64_t words, int64_t* where) {
  *where = 0;
  const Table table = open_readonly(index, words);
  if (table.num_slots == 0) return kFaultHeader;
  std::vector<uint32_t> counted(table.num_slots);
  for (int64_t i = 0; i < table.capacity(); ++i) {
    const uint64_t entry = table.entries[i];
    if (entry == 0 || is_dead(table, entry, table.generations)) continue;
    ++counted[tenant_of(entry) & ((1u << table.slot_bits) - 1)];
  }
  uint32_t held = 0;
  for (uint32_t i = 0; i < table.num_slots; ++i) {
    *where = i;
    const uint32_t* slot = table.slot(i);
    uint32_t min_n, max_n;
    bool latest;
    if (slot[kSlotOptions] != 0 && !unpack(slot[kSlotOptions], &min_n, &max_n, &latest)) return kFaultState;
    const bool holds_nothing = slot[kSlotHeld] == 0 && slot[kSlotIndexed] == 0;
    if ((slot[kSlotOptions] == 0 || slot[kSlotGivenUp] != 0) && !holds_nothing) return kFaultState;
    if (slot[kSlotIndexed] > kMaxIndexedTokens) return kFaultState;
    if (is_other_number(table, i, slot[kSlotHeld], counted[i])) return kFaultHeld;
    held += slot[kSlotHeld];
  }
  return held == table.header[kHeaderEntries] ? kFaultNone : kFaultEntries;
}

IndexFault check_device_index_row(const int32_t* index, int64_t words, int64_t slot_id, const int32_t* tokens,
                                  int64_t num_tokens) {
  const Table table = open_readonly(index, words);
  if (table.num_slots == 0) return kFaultHeader;
  if (!table.has(slot_id)) return kFaultNoSlot;
  const uint32_t id = static_cast<uint32_t>(slot_id);
  const uint32_t* slot = table.slot(id);
  if (slot[kSlotOptions] == 0 || slot[kSlotGivenUp] != 0) return kFaultNone;
  uint32_t min_n, max_n;
  bool latest;
  if (!unpack(slot[kSlotOptions], &min_n, &max_n, &latest)) return kFaultState;
  const uint32_t indexed = slot[kSlotIndexed];
  if (indexed > num_tokens) return kFaultRow;

  const uint32_t tenant = table.tenant(id, table.generations[id]);
  for (int64_t i = 0; i < table.capacity() && !has_wrapped(table, id); ++i) {
    const uint64_t entry = table.entries[i];
    if (entry == 0 || tenant_of(entry) != tenant) continue;
    const uint32_t level = level_of(entry), n = min_n + level, end = end_of(entry);
    if (n > max_n) return kFaultPlace;
    if (end >= indexed || end + 1 < n) return kFaultOutside;
    const Place place = place_at(table, id, tokens, end, n, level);
    const uint32_t bucket = static_cast<uint32_t>(i / kBucketEntries);
    if (head_of(entry) != place.head || (bucket != place.bucket[0] && bucket != place.bucket[1])) return kFaultPlace;
  }

  for (uint32_t end = min_n - 1; end < indexed; ++end) {
    for (uint32_t n = min_n; n <= max_n && n <= end + 1; ++n) {
      const Place place = place_at(table, id, tokens, end, n, n - min_n);
      uint32_t found = indexed;
      for (const uint32_t bucket : place.bucket) {
        for (int64_t i = bucket * kBucketEntries; i < (bucket + int64_t{1}) * kBucketEntries; ++i) {
          const uint64_t entry = table.entries[i];
          const uint32_t at = end_of(entry);
          if (head_of(entry) != place.head || at >= indexed || at + 1 < n || !same(tokens, at, end, n)) continue;
          if (found == indexed || (latest ? at > found : at < found)) found = at;
        }
      }
      if (found == indexed) return kFaultMissing;
      // Follows the definition; slow.
      for (uint32_t e = latest ? found + 1 : n - 1; e < (latest ? indexed : found); ++e) {
        if (same(tokens, e, end, n)) return kFaultRecorded;
      }
    }
  }
  return kFaultNone;
}

}  // namespace ngram_npu::host
