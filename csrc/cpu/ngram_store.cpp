// The store's entries: found, entered, renumbered; for its operators and the drafting core.
#include "cpu/ngram_store.h"

#include <cstring>

namespace ngram_npu::cpu {

using namespace store;

namespace {

// kPowers[j]: kBase to the power of j.
struct BasePowers {
  uint64_t of[kLadderMaxN];
  constexpr BasePowers() : of() {
    of[0] = 1;
    for (int j = 1; j < kLadderMaxN; ++j) of[j] = of[j - 1] * kBase;
  }
};
constexpr BasePowers kPowers;

// The number of tokens that agree before two ends, at most `limit`.
uint32_t agreeing(const int32_t* a, const int32_t* b, uint32_t limit) {
  uint32_t n = 0;
  while (n < limit && *--a == *--b) ++n;
  return n;
}

// The entries of a line that have a tag, as bits. Without branches, which would not be predictable.
uint32_t tagged(const Entry* line, uint32_t tag) {
  uint32_t lanes = 0;
  for (uint32_t i = 0; i < kLineEntries; ++i) lanes |= uint32_t{line[i].state >> 8 == tag} << i;
  return lanes;
}

// The entry to overwrite with a new one: the first that is empty or whose block is no longer alive, otherwise the
// oldest.
uint32_t victim_in(const Store& store, const Entry* line) {
  const uint32_t oldest = oldest_place(store);
  uint32_t forgotten = 0, victim = 0;
  for (uint32_t i = 0; i < kLineEntries; ++i) {
    forgotten |= uint32_t{line[i].place < oldest} << i;
    victim = line[i].place < line[victim].place ? i : victim;
  }
  if (forgotten != 0) return static_cast<uint32_t>(__builtin_ctz(forgotten));
  store.count(kStatEvicted);
  return victim;
}

void enter(const Store& store, const GramKeys& keys, uint64_t scope, uint32_t place) {
  const uint32_t serial = place >> kBlockBits, offset = place % kBlockTokens;
  const int32_t* const text = store.text(serial);
  const int32_t token = text[offset];
  uint8_t outcome = 0;
  bool has_hit = false;
  for (uint32_t level = keys.levels; level-- > 0;) {
    const StoreHit hit = find_hit(store, keys, level, scope, text + offset, offset);
    if (hit.entry != nullptr) {
      const uint32_t at = hit.entry->place;
      const bool same = store.text(at >> kBlockBits)[at % kBlockTokens] == token;
      if (!has_hit) outcome = static_cast<uint8_t>(smaller<uint32_t>(hit.agreed, kCostRows - 1) * 2 + same);
      has_hit = true;
      *hit.entry = updated(*hit.entry, same, place);
      continue;
    }
    Entry* const victim = store.line(keys.of[level]) + victim_in(store, store.line(keys.of[level]));
    *victim = {static_cast<uint32_t>(keys.of[level]) << 8, place};
  }
  store.outcomes(serial)[offset] = outcome;
  store.count(kStatEntered);
}

}  // namespace

StoreParts store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits) {
  if (num_slots < 1 || num_slots > kMaxSlots || num_blocks < kLeastBlocksPerSlot * num_slots ||
      num_blocks > kMaxBlocks || line_bits < 1 || line_bits > kMaxLineBits) {
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
  const StoreParts parts = store_parts(header[kHeaderSlots], header[kHeaderBlocks], header[kHeaderLineBits]);
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

void forget_all(const Store& store) {
  const auto clear = [](uint32_t* words, size_t count) { std::memset(words, 0, count * sizeof(uint32_t)); };
  clear(store.slots, size_t{store.num_slots} * kSlotWords);
  clear(store.heads, size_t{store.num_blocks} * kHeadWords);
  clear(store.lines, size_t{kLineWords} << store.line_bits);
  store.header[kHeaderNextSerial] = 1;
  ++store.header[kHeaderEpoch];
}

void renumber(const Store& store) {
  const uint32_t by = renumbering(store.num_blocks);
  for (uint32_t i = 0; i < store.num_slots; ++i) {
    uint32_t* const slot = store.slot(i);
    slot[kSlotSerial] = renumbered(slot[kSlotSerial], by);
  }
  for (uint32_t i = 0; i < store.num_blocks; ++i) {
    uint32_t* const head = store.heads + size_t{i} * kHeadWords;
    head[kHeadSerial] = renumbered(head[kHeadSerial], by);
    head[kHeadPrevious] = renumbered(head[kHeadPrevious], by);
    head[kHeadNext] = renumbered(head[kHeadNext], by);
  }
  auto* const entries = reinterpret_cast<Entry*>(store.lines);
  for (uint64_t i = 0; i < uint64_t{kLineEntries} << store.line_bits; ++i) {
    const uint32_t place = entries[i].place;
    const uint32_t serial = renumbered(place >> kBlockBits, by);
    entries[i] = serial == 0 ? Entry{0, 0} : Entry{entries[i].state, serial << kBlockBits | place % kBlockTokens};
  }
  store.header[kHeaderNextSerial] -= by;
  ++store.header[kHeaderEpoch];
  store.count(kStatRenumbered);
}

void count_busy(const Store& store) { __atomic_fetch_add(store.header + kStatBusy, 1u, __ATOMIC_RELAXED); }

uint32_t oldest_place(const Store& store) {
  const uint32_t next = store.header[kHeaderNextSerial];
  return (next > store.num_blocks ? next - store.num_blocks : 1) << kBlockBits;
}

GramKeys keys_before(const int32_t* end, int64_t length, uint64_t seed) {
  GramKeys keys;
  keys.levels = 0;
  uint64_t gram = 0;
  int64_t j = 0;
  for (uint32_t level = 0; level < kLadderLevels; ++level) {
    const int64_t size = ladder_size(level);
    if (size > length) break;
    for (; j < size; ++j) gram += static_cast<uint32_t>(end[-1 - j]) * kPowers.of[j];
    keys.of[keys.levels++] = key_of(gram, seed, level);
  }
  return keys;
}

StoreHit find_hit(const Store& store, const GramKeys& keys, uint32_t level, uint64_t scope, const int32_t* end,
                  int64_t length) {
  const uint64_t key = keys.of[level];
  const uint32_t tag = static_cast<uint32_t>(key) & 0xffffffu, size = ladder_size(level);
  Entry* const line = store.line(key);
  for (uint32_t left = tagged(line, tag); left != 0; left &= left - 1) {
    const int i = __builtin_ctz(left);
    const uint32_t serial = line[i].place >> kBlockBits, offset = line[i].place % kBlockTokens;
    // The contract demands this order: the scope is compared before any token.
    if (!store.alive(serial)) continue;
    if (store.scope(serial) != scope) continue;
    const uint32_t most = static_cast<uint32_t>(smaller<int64_t>(kLadderMaxN, smaller<int64_t>(offset, length)));
    const uint32_t agreed = agreeing(store.text(serial) + offset, end, most);
    if (agreed >= size) return {line + i, agreed};
  }
  return {nullptr, 0};
}

void prefetch_hit(const Store& store, const GramKeys& keys, uint32_t level) {
  const uint32_t tag = static_cast<uint32_t>(keys.of[level]) & 0xffffffu;
  const Entry* const line = store.line(keys.of[level]);
  const uint32_t lanes = tagged(line, tag);
  if (lanes == 0) return;
  const uint32_t place = line[__builtin_ctz(lanes)].place, serial = place >> kBlockBits, offset = place % kBlockTokens;
  __builtin_prefetch(store.head(serial));
  __builtin_prefetch(store.text(serial) + offset - smaller(offset, 8u));
  __builtin_prefetch(store.text(serial) + offset);
}

void Entering::add(uint32_t place, uint64_t scope, uint64_t seed) {
  Item& item = items_[size_++];
  const uint32_t serial = place >> kBlockBits, offset = place % kBlockTokens;
  item.keys = keys_before(store_.text(serial) + offset, offset, seed);
  item.scope = scope;
  item.place = place;
  for (uint32_t level = 0; level < item.keys.levels; ++level) __builtin_prefetch(store_.line(item.keys.of[level]));
  if (size_ == kGroup) flush();
}

void Entering::flush() {
  for (uint32_t i = 0; i < size_; ++i) {
    for (uint32_t level = 0; level < items_[i].keys.levels; ++level) prefetch_hit(store_, items_[i].keys, level);
  }
  for (uint32_t i = 0; i < size_; ++i) enter(store_, items_[i].keys, items_[i].scope, items_[i].place);
  size_ = 0;
}

void close_slot(const Store& store, uint32_t slot_id, Entering* entering) {
  uint32_t* const slot = store.slot(slot_id);
  const uint32_t newest = slot[kSlotSerial];
  slot[kSlotSerial] = slot[kSlotLength] = 0;
  if (newest == 0) return;
  if (!store.alive(newest)) return store.count(kStatLostBlocks);
  if (store.header[kHeaderVisibility] != kFinish) return;
  const uint64_t scope = store.scope(newest), seed = scope_seed(scope);
  uint32_t oldest = newest;
  store.head(newest)[kHeadNext] = 0;
  for (uint32_t before = store.head(oldest)[kHeadPrevious]; before < oldest && store.alive(before);
       before = store.head(oldest)[kHeadPrevious]) {
    store.head(before)[kHeadNext] = oldest;
    oldest = before;
  }
  for (uint32_t serial = oldest; serial != 0; serial = store.head(serial)[kHeadNext]) {
    const uint32_t fill = store.fill(serial);
    for (uint32_t i = store.head(serial)[kHeadFirst]; i < fill; ++i)
      entering->add(serial << kBlockBits | i, scope, seed);
  }
  entering->flush();
}

}  // namespace ngram_npu::cpu
