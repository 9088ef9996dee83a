// Operations on the store's tensor: allocating blocks, finding grams, inserting tokens; and the functions that create,
// check and clear a store. The operators are in store.cpp.
//
// A store with an invalid header is not an error, because its contents are data: the operators do nothing.
#pragma once

#include <cstddef>
#include <thread>

#include "core/store.h"

namespace ngram_npu {

// Faults that ngram_npu_cpu_ngram_store_check reports.
#define NGRAM_NPU_STORE_FAULTS(X)                                                                    \
  X(None, "")                                                                                        \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramStore?")       \
  X(Slot, "a slot's block belongs to another request, or has more tokens than the slot")             \
  X(Block, "a block is not where its serial number leads, or its serial number was not assigned")    \
  X(Fill, "a block's number of tokens exceeds its size")                                             \
  X(Link, "a block does not follow the one that it names as its previous one, or has another scope") \
  X(Place, "an entry points beyond the text, or to text that was cleared")                           \
  X(Key, "an entry is not where its gram leads")                                                     \
  X(Counts, "an entry was wrong more often than its rule allows")                                    \
  X(Twice, "a gram has two entries")                                                                 \
  X(Piece, "a piece of a file is not one of a store of these sizes")

enum StoreFault : int32_t {
#define NGRAM_NPU_FAULT(name, text) kStoreFault##name,
  NGRAM_NPU_STORE_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

constexpr const char* kStoreFaultTexts[] = {
#define NGRAM_NPU_FAULT(name, text) text,
    NGRAM_NPU_STORE_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

}  // namespace ngram_npu

namespace ngram_npu::cpu {

// The tensor's parts. The code relies only on the tensor's size and on what open_store derived from it, never on the
// contents.
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
  bool is_live(uint32_t serial) const { return serial != 0 && head(serial)[store::kHeadSerial] == serial; }
  uint64_t scope(uint32_t serial) const {
    const uint32_t* words = head(serial) + store::kHeadScope;
    return uint64_t{words[1]} << 32 | words[0];
  }
  uint32_t fill(uint32_t serial) const { return smaller(head(serial)[store::kHeadFill], store::kBlockTokens); }

  void count(store::Header statistic, uint32_t times = 1) const { header[statistic] += times; }
};

// The offsets of the layout's parts in words. `end` is 0 if the sizes are invalid.
struct StoreParts {
  int64_t slots, heads, lines, tokens, bytes, end;
};
StoreParts store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits);

// False if the header does not match the tensor.
bool open_store(int32_t* words, int64_t num_words, Store* store);

// Checks the blocks and the serial numbers. On a fault, *where is the block.
StoreFault check_blocks(const Store& store, int64_t* where);
// Removes all text and closes all requests.
void remove_all_text(const Store& store);
// Assigns small serial numbers to all blocks, in the same order.
void renumber(const Store& store);
// The first position with a block that may be live. Clearing a block removes its entries, so the block of an entry is
// live if and only if the entry's position is not below this one.
uint32_t oldest_position(const Store& store);
// Counts a call that skipped the store.
void count_busy(const Store& store);

// Locks a store for one call; false if another call holds the lock. Waits for a copy to a file.
class StoreUse {
 public:
  explicit StoreUse(const Store& store) : store_(store), locked_(try_lock(store)) {}
  ~StoreUse() {
    if (locked_) unlock(store_);
  }
  StoreUse(const StoreUse&) = delete;
  StoreUse& operator=(const StoreUse&) = delete;
  explicit operator bool() const { return locked_; }

  static bool try_lock(const Store& store, uint32_t lock_value = 1) {
    for (int tries = 0; tries < kMaxLockAttempts; ++tries) {
      uint32_t current = 0;
      if (__atomic_compare_exchange_n(store.header + store::kHeaderBusy, &current, lock_value, false, __ATOMIC_ACQUIRE,
                                      __ATOMIC_RELAXED)) {
        return true;
      }
      if (current != store::kCopying) return false;
      std::this_thread::yield();
    }
    return false;
  }
  static void unlock(const Store& store) { __atomic_store_n(store.header + store::kHeaderBusy, 0u, __ATOMIC_RELEASE); }

 private:
  // About a minute, because a header with random contents must not block forever.
  static constexpr int kMaxLockAttempts = 1 << 26;

  const Store& store_;
  const bool locked_;
};

// The keys of the grams that end before a position, one for each ladder length that fits.
struct GramKeys {
  uint64_t values[kLadderLevels];
  uint32_t levels;
};
// `end`: one past the last of `length` tokens.
GramKeys keys_before(const int32_t* end, int64_t length, uint64_t seed);

// An entry, and the number of tokens before its position that agree with the row's last tokens, at most 16. Without a
// hit, entry is null.
struct StoreHit {
  store::Entry* entry;
  uint32_t match_len;
};

// A queue that inserts entries for tokens, in order. The memory for one token is prefetched while others are inserted.
class TokenInserter {
 public:
  explicit TokenInserter(const Store& store) : store_(store) {}

  // Adds the token at `position`, which is already in its block.
  void add(uint32_t position, uint64_t scope, uint64_t seed);
  void flush();

 private:
  static constexpr uint32_t kGroup = 32;
  struct Item {
    GramKeys keys;
    uint64_t scope;
    uint32_t position;
  };

  const Store& store_;
  Item items_[kGroup];
  uint32_t size_ = 0;
};

StoreHit find_hit(const Store& store, const GramKeys& keys, uint32_t level, uint64_t scope, const int32_t* end,
                  int64_t length);
// Prefetches what find_hit will read for the first entry with the right tag.
void prefetch_hit(const Store& store, const GramKeys& keys, uint32_t level);

// Closes the slot of a finished request and inserts entries for the text that was not visible yet.
void close_slot(const Store& store, uint32_t slot_id, TokenInserter* inserter);

}  // namespace ngram_npu::cpu

// The offsets of a store's parts in words: slots, heads, lines, tokens, bytes, end. All 0 if the sizes are invalid.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits,
                                                      int64_t parts[6]);
// Creates an empty store in `words` zeroed words. Returns kInvalidParams if they are too few for these sizes.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots,
                                                        int64_t num_blocks, int64_t line_bits, uint32_t visibility);
// Returns 0 or a StoreFault; *where is the slot, block or entry.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_check(const int32_t* store, int64_t words, int64_t* where);
// Writes the number of stored tokens, of live blocks, and of slots with an open request.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_usage(const int32_t* store, int64_t words, int64_t usage[3]);
// Locks the store for the caller, as operators do. Returns false if another call holds the lock or it is not a store.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_ngram_store_take(int32_t* store, int64_t words);
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_give_back(int32_t* store, int64_t words);
// Number of pieces in which a store's contents, without its slots, are copied to a file. Each piece is a consistent
// copy of a part. The store may be used between two pieces, unless its epoch changes. The pieces of the blocks come
// first, the header's piece is the last.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* store, int64_t words);
constexpr int64_t kStorePieceWords = 1024 * (ngram_npu::store::kHeadWords + 256 + 64);
// Writes at most kStorePieceWords words and returns their number; -1 if another call is using the store.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pack(int32_t* store, int64_t words, int64_t piece, uint32_t* to);
// Adds a piece to a store of the same sizes that was empty before the first piece and is not in use. Pieces must be in
// order. Returns 0 or a StoreFault.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_unpack(int32_t* store, int64_t words, int64_t piece,
                                                          const uint32_t* from, int64_t count);
// Zeroes the text of a scope, or of all scopes if `scope` is null. The caller holds the lock.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_clear(int32_t* store, int64_t words, const int64_t* scope);
