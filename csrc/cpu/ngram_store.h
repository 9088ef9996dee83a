// The store's tensor as its operators use it: blocks given out, grams found, tokens entered.
#pragma once

#include <cstddef>

#include "core/ngram_store.h"

namespace ngram_npu::cpu {

// The tensor's parts. Trusted are its size and what open_store derived from it, never its contents.
struct Store {
  uint32_t* header;
  uint32_t* slots;
  uint32_t* heads;
  uint32_t* lines;
  int32_t* tokens;
  uint8_t* bytes;
  uint32_t num_slots;
  uint32_t num_blocks;
  uint32_t line_bits;

  uint32_t* slot(uint32_t id) const { return slots + size_t{id} * store::kSlotWords; }
  uint32_t block_of(uint32_t serial) const { return serial % num_blocks; }
  uint32_t* head(uint32_t serial) const { return heads + size_t{block_of(serial)} * store::kHeadWords; }
  int32_t* text(uint32_t serial) const { return tokens + size_t{block_of(serial)} * store::kBlockTokens; }
  uint8_t* outcomes(uint32_t serial) const { return bytes + size_t{block_of(serial)} * store::kBlockTokens; }
  store::Entry* line(uint64_t key) const {
    return reinterpret_cast<store::Entry*>(lines + (key >> (64 - line_bits)) * store::kLineWords);
  }
  bool alive(uint32_t serial) const { return serial != 0 && head(serial)[store::kHeadSerial] == serial; }
  uint64_t scope(uint32_t serial) const {
    const uint32_t* words = head(serial) + store::kHeadScope;
    return uint64_t{words[1]} << 32 | words[0];
  }
  uint32_t fill(uint32_t serial) const { return smaller(head(serial)[store::kHeadFill], store::kBlockTokens); }

  void count(store::Header statistic, uint32_t times = 1) const { header[statistic] += times; }
};

// The layout's parts in words, one behind the other. `end` 0: there is no store of that size.
struct StoreParts {
  int64_t slots, heads, lines, tokens, bytes, end;
};
StoreParts store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits);

// False where the header does not fit the tensor.
bool open_store(int32_t* words, int64_t num_words, Store* store);

// Forgets all text, and which requests are open.
void forget_all(const Store& store);
// A call that went without the store.
void count_busy(const Store& store);

// A store that one call has for itself; false where another has it.
class StoreUse {
 public:
  explicit StoreUse(const Store& store) : store_(store), got_(take(store)) {}
  ~StoreUse() {
    if (got_) give_back(store_);
  }
  StoreUse(const StoreUse&) = delete;
  StoreUse& operator=(const StoreUse&) = delete;
  explicit operator bool() const { return got_; }

  static bool take(const Store& store) {
    return __atomic_exchange_n(store.header + store::kHeaderBusy, 1u, __ATOMIC_ACQUIRE) == 0;
  }
  static void give_back(const Store& store) {
    __atomic_store_n(store.header + store::kHeaderBusy, 0u, __ATOMIC_RELEASE);
  }

 private:
  const Store& store_;
  const bool got_;
};

// The keys of the grams that end before a place, one for each size that is there.
struct GramKeys {
  uint64_t of[kLadderLevels];
  uint32_t levels;
};
// `end`: behind the last of `length` tokens.
GramKeys keys_before(const int32_t* end, int64_t length, uint64_t seed);

// An entry and the tokens that agree before its place, at most 16; entry null: no hit.
struct StoreHit {
  store::Entry* entry;
  uint32_t agreed;
};

// Tokens that wait to be entered, in order. What one of them reads is fetched while others are entered.
class Entering {
 public:
  explicit Entering(const Store& store) : store_(store) {}

  // The token at `place`, which its block holds.
  void add(uint32_t place, uint64_t scope, uint64_t seed);
  void flush();

 private:
  static constexpr uint32_t kGroup = 32;
  struct Item {
    GramKeys keys;
    uint64_t scope;
    uint32_t place;
  };

  const Store& store_;
  Item items_[kGroup];
  uint32_t size_ = 0;
};

StoreHit find_hit(const Store& store, const GramKeys& keys, uint32_t level, uint64_t scope, const int32_t* end,
                  int64_t length);
// Fetches what find_hit will read of the line at hand.
void prefetch_hit(const Store& store, const GramKeys& keys, uint32_t level);

// A slot's request has ended: what it holds back is entered.
void close_slot(const Store& store, uint32_t slot_id, Entering* entering);

}  // namespace ngram_npu::cpu
