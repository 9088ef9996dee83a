// Finds, inserts and renumbers the store's entries, for the operators and for drafting on the host.
#include "cpu/ngram_store.h"

#include <cstring>

namespace ngram_npu::cpu {

using namespace store;

namespace {

// values[j] is kHashBase to the power of j.
struct BasePowers {
  uint64_t values[kLadderMaxN];
  constexpr BasePowers() : values() {
    values[0] = 1;
    for (int j = 1; j < kLadderMaxN; ++j) values[j] = values[j - 1] * kHashBase;
  }
};
constexpr BasePowers kBasePowers;

// Counts the equal tokens, at most `limit`, before the ends `a` and `b`.
uint32_t count_common_suffix(const int32_t* a, const int32_t* b, uint32_t limit) {
  uint32_t n = 0;
  while (n < limit && *--a == *--b) ++n;
  return n;
}

// Bit i of the result is set if entry i of a line has the tag. There are no branches, because they would not be
// predictable.
uint32_t find_lanes_with_tag(const Entry* line, uint32_t tag) {
  uint32_t lanes = 0;
  for (uint32_t i = 0; i < kLineEntries; ++i) lanes |= uint32_t{line[i].state >> 8 == tag} << i;
  return lanes;
}

// Returns the index of the entry to overwrite with a new entry: the first entry that is empty or whose block is no
// longer alive, otherwise the oldest entry.
uint32_t find_entry_to_replace(const Store& store, const Entry* line) {
  const uint32_t oldest_alive_position = oldest_position(store);
  uint32_t unused_lanes = 0, oldest_lane = 0;
  for (uint32_t i = 0; i < kLineEntries; ++i) {
    unused_lanes |= uint32_t{line[i].position < oldest_alive_position} << i;
    oldest_lane = line[i].position < line[oldest_lane].position ? i : oldest_lane;
  }
  if (unused_lanes != 0) return static_cast<uint32_t>(__builtin_ctz(unused_lanes));
  store.add_to_statistic(kStatEvicted);
  return oldest_lane;
}

// Updates or inserts the entries of all n-grams that end before the token at `position`; records the token's outcome.
void insert_token(const Store& store, const NgramKeys& keys, uint64_t scope, uint32_t position) {
  const uint32_t serial = position >> kBlockBits, offset = position % kBlockTokens;
  const int32_t* const text = store.text(serial);
  const int32_t token = text[offset];
  uint8_t outcome = 0;
  bool has_hit = false;
  for (uint32_t level = keys.levels; level-- > 0;) {
    const StoreHit hit = find_hit(store, keys, level, scope, text + offset, offset);
    if (hit.entry != nullptr) {
      const uint32_t predicted = hit.entry->position;
      const bool is_correct = store.text(predicted >> kBlockBits)[predicted % kBlockTokens] == token;
      if (!has_hit) outcome = static_cast<uint8_t>(smaller<uint32_t>(hit.match_len, kCostRows - 1) * 2 + is_correct);
      has_hit = true;
      *hit.entry = updated_entry(*hit.entry, is_correct, position);
      continue;
    }
    Entry* const line = store.line(keys.values[level]);
    line[find_entry_to_replace(store, line)] = {static_cast<uint32_t>(keys.values[level]) << 8, position};
  }
  store.outcomes(serial)[offset] = outcome;
  store.add_to_statistic(kStatInserted);
}

}  // namespace

StoreParts compute_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits) {
  if (num_slots < 1 || num_slots > kMaxSlots || num_blocks < kMinBlocksPerSlot * num_slots || num_blocks > kMaxBlocks ||
      line_bits < 1 || line_bits > kMaxLineBits) {
    return {};
  }
  StoreParts parts{};
  parts.slots = kHeaderWords;
  parts.heads = parts.slots + num_slots * kSlotWords;
  const int64_t heads_end = parts.heads + num_blocks * kHeadWords;
  parts.lines = (heads_end + kLineWords - 1) / kLineWords * kLineWords;
  parts.tokens = parts.lines + (int64_t{kLineWords} << line_bits);
  parts.bytes = parts.tokens + num_blocks * kBlockTokens;
  parts.end = parts.bytes + num_blocks * kByteWords;
  return parts;
}

bool open_store(int32_t* words, int64_t num_words, Store* store) {
  if (num_words < kHeaderWords) return false;
  auto* const header = reinterpret_cast<uint32_t*>(words);
  if (header[kHeaderMagic] != kMagic) return false;
  const StoreParts parts = compute_store_parts(header[kHeaderSlots], header[kHeaderBlocks], header[kHeaderLineBits]);
  if (parts.end == 0 || parts.end > num_words) return false;
  *store = {header,
            header + parts.slots,
            header + parts.heads,
            header + parts.lines,
            words + parts.tokens,
            reinterpret_cast<uint8_t*>(words + parts.bytes),
            header[kHeaderSlots],
            header[kHeaderBlocks],
            header[kHeaderLineBits]};
  return true;
}

void clear_all_text(const Store& store) {
  const auto clear = [](uint32_t* words, size_t count) { std::memset(words, 0, count * sizeof(uint32_t)); };
  clear(store.slots, size_t{store.num_slots} * kSlotWords);
  clear(store.heads, size_t{store.num_blocks} * kHeadWords);
  clear(store.lines, size_t{kLineWords} << store.line_bits);
  store.header[kHeaderNextSerial] = 1;
  ++store.header[kHeaderEpoch];
}

void renumber_blocks(const Store& store) {
  const uint32_t offset = max_serial_offset(store.num_blocks);
  for (uint32_t i = 0; i < store.num_slots; ++i) {
    uint32_t* const slot = store.slot(i);
    slot[kSlotSerial] = renumber_serial(slot[kSlotSerial], offset);
  }
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    head[kHeadSerial] = renumber_serial(head[kHeadSerial], offset);
    head[kHeadPrevious] = renumber_serial(head[kHeadPrevious], offset);
    head[kHeadNext] = renumber_serial(head[kHeadNext], offset);
  }
  auto* const entries = reinterpret_cast<Entry*>(store.lines);
  for (uint64_t i = 0; i < uint64_t{kLineEntries} << store.line_bits; ++i) {
    const uint32_t position = entries[i].position;
    const uint32_t serial = renumber_serial(position >> kBlockBits, offset);
    entries[i] = serial == 0 ? Entry{0, 0} : Entry{entries[i].state, serial << kBlockBits | position % kBlockTokens};
  }
  store.header[kHeaderNextSerial] -= offset;
  ++store.header[kHeaderEpoch];
  store.add_to_statistic(kStatRenumberings);
}

void count_skipped_call(const Store& store) {
  __atomic_fetch_add(store.header + kStatSkippedCalls, 1u, __ATOMIC_RELAXED);
}

uint32_t oldest_position(const Store& store) {
  const uint32_t next_serial = store.header[kHeaderNextSerial];
  return (next_serial > store.num_blocks ? next_serial - store.num_blocks : 1) << kBlockBits;
}

NgramKeys compute_ngram_keys(const int32_t* end, int64_t length, uint64_t seed) {
  NgramKeys keys;
  keys.levels = 0;
  uint64_t ngram_hash = 0;
  int64_t j = 0;
  for (uint32_t level = 0; level < kLadderLevels; ++level) {
    const int64_t n = ladder_ngram_length(level);
    if (n > length) break;
    for (; j < n; ++j) ngram_hash += static_cast<uint32_t>(end[-1 - j]) * kBasePowers.values[j];
    keys.values[keys.levels++] = key_of(ngram_hash, seed, level);
  }
  return keys;
}

StoreHit find_hit(const Store& store, const NgramKeys& keys, uint32_t level, uint64_t scope, const int32_t* end,
                  int64_t length) {
  const uint64_t key = keys.values[level];
  const uint32_t tag = static_cast<uint32_t>(key) & 0xffffffu, n = ladder_ngram_length(level);
  Entry* const line = store.line(key);
  for (uint32_t lanes = find_lanes_with_tag(line, tag); lanes != 0; lanes &= lanes - 1) {
    const int i = __builtin_ctz(lanes);
    const uint32_t serial = line[i].position >> kBlockBits, offset = line[i].position % kBlockTokens;
    // The contract requires this order: the scope is compared before any token.
    if (!store.is_alive(serial)) continue;
    if (store.scope(serial) != scope) continue;
    const uint32_t limit = static_cast<uint32_t>(smaller<int64_t>(kLadderMaxN, smaller<int64_t>(offset, length)));
    const uint32_t match_len = count_common_suffix(store.text(serial) + offset, end, limit);
    if (match_len >= n) return {line + i, match_len};
  }
  return {nullptr, 0};
}

void prefetch_hit(const Store& store, const NgramKeys& keys, uint32_t level) {
  const uint32_t tag = static_cast<uint32_t>(keys.values[level]) & 0xffffffu;
  const Entry* const line = store.line(keys.values[level]);
  const uint32_t lanes = find_lanes_with_tag(line, tag);
  if (lanes == 0) return;
  const uint32_t position = line[__builtin_ctz(lanes)].position, serial = position >> kBlockBits,
                 offset = position % kBlockTokens;
  __builtin_prefetch(store.head(serial));
  __builtin_prefetch(store.text(serial) + offset - smaller(offset, 8u));
  __builtin_prefetch(store.text(serial) + offset);
}

void TokenInserter::add_token(uint32_t position, uint64_t scope, uint64_t seed) {
  Item& item = items_[size_++];
  const uint32_t serial = position >> kBlockBits, offset = position % kBlockTokens;
  item.keys = compute_ngram_keys(store_.text(serial) + offset, offset, seed);
  item.scope = scope;
  item.position = position;
  for (uint32_t level = 0; level < item.keys.levels; ++level) __builtin_prefetch(store_.line(item.keys.values[level]));
  if (size_ == kGroupTokens) flush();
}

void TokenInserter::flush() {
  for (uint32_t i = 0; i < size_; ++i) {
    for (uint32_t level = 0; level < items_[i].keys.levels; ++level) prefetch_hit(store_, items_[i].keys, level);
  }
  for (uint32_t i = 0; i < size_; ++i) insert_token(store_, items_[i].keys, items_[i].scope, items_[i].position);
  size_ = 0;
}

void close_slot(const Store& store, uint32_t slot_id, TokenInserter* inserter) {
  uint32_t* const slot = store.slot(slot_id);
  const uint32_t newest_serial = slot[kSlotSerial];
  slot[kSlotSerial] = slot[kSlotLength] = 0;
  if (newest_serial == 0) return;
  if (!store.is_alive(newest_serial)) return store.add_to_statistic(kStatLostBlocks);
  if (store.header[kHeaderVisibility] != kFinish) return;
  const uint64_t scope = store.scope(newest_serial), seed = scope_seed(scope);
  uint32_t oldest_serial = newest_serial;
  store.head(newest_serial)[kHeadNext] = 0;
  for (uint32_t previous_serial = store.head(oldest_serial)[kHeadPrevious];
       previous_serial < oldest_serial && store.is_alive(previous_serial);
       previous_serial = store.head(oldest_serial)[kHeadPrevious]) {
    store.head(previous_serial)[kHeadNext] = oldest_serial;
    oldest_serial = previous_serial;
  }
  for (uint32_t serial = oldest_serial; serial != 0; serial = store.head(serial)[kHeadNext]) {
    const uint32_t fill = store.fill(serial);
    for (uint32_t i = store.head(serial)[kHeadFirst]; i < fill; ++i)
      inserter->add_token(serial << kBlockBits | i, scope, seed);
  }
  inserter->flush();
}

}  // namespace ngram_npu::cpu
