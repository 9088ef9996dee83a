// Finds n-grams in a store and inserts tokens; creates, checks, copies and clears a store. The operators are in
// store.cpp.
//
// A store with an invalid header is not an error, because the contents of a tensor are data: the operators do nothing.
#pragma once

#include <cstddef>
#include <thread>

#include "core/store.h"

namespace ngram_npu {

// Faults that ngram_npu_cpu_ngram_store_check reports.
#define NGRAM_NPU_STORE_FAULTS(X)                                                              \
  X(None, "")                                                                                  \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramStore?") \
  X(Slot, "a slot's block belongs to another request, or has more tokens than the slot")       \
  X(Block, "a block is not at the index of its serial number, or the number was not assigned") \
  X(Fill, "a block's number of tokens exceeds its size")                                       \
  X(Link, "a block's previous block is not older, or has another scope")                       \
  X(Place, "an entry points outside the text, or to text that was cleared")                    \
  X(Key, "an entry is not in the line of its n-gram, or has another tag")                      \
  X(Counts, "an entry has more wrong predictions than the update rule allows")                 \
  X(Duplicate, "an n-gram has two entries")                                                    \
  X(Piece, "a piece of a file does not belong to a store of these sizes")

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

// The parts of the tensor. For memory safety, the code relies only on these pointers and numbers, which open_store()
// has checked against the tensor's size, and not on the tensor's other contents.
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
  bool is_alive(uint32_t serial) const { return serial != 0 && head(serial)[store::kHeadSerial] == serial; }
  uint64_t scope(uint32_t serial) const {
    const uint32_t* words = head(serial) + store::kHeadScope;
    return uint64_t{words[1]} << 32 | words[0];
  }
  uint32_t fill(uint32_t serial) const { return smaller(head(serial)[store::kHeadFill], store::kBlockTokens); }

  void add_to_statistic(store::Header statistic, uint32_t amount = 1) const { header[statistic] += amount; }
};

// The offsets of the layout's parts in words. `end` is 0 if the sizes are invalid.
struct StoreParts {
  int64_t slots, heads, lines, tokens, bytes, end;
};
StoreParts compute_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits);

// Finds the parts of the tensor. Returns false if the header does not match the tensor's size.
bool open_store(int32_t* words, int64_t num_words, Store* store);

// Checks the blocks and their serial numbers. If there is a fault, *location is the block.
StoreFault check_blocks(const Store& store, int64_t* location);
// Clears all text and closes all slots.
void clear_all_text(const Store& store);
// Subtracts max_serial_offset() from all serial numbers when all numbers have been assigned.
void renumber_blocks(const Store& store);
// The first position of the oldest block that may be alive. Clearing a block removes its entries, so the block of an
// entry is alive if and only if the entry's position is at least this position.
uint32_t oldest_position(const Store& store);
// Counts a call that skipped the store.
void count_skipped_call(const Store& store);

// Locks a store for one call. The object converts to false if another call has locked the store. The constructor waits
// while a piece is copied to a file.
class StoreLock {
 public:
  explicit StoreLock(const Store& store) : store_(store), locked_(try_lock(store)) {}
  ~StoreLock() {
    if (locked_) unlock(store_);
  }
  StoreLock(const StoreLock&) = delete;
  StoreLock& operator=(const StoreLock&) = delete;
  explicit operator bool() const { return locked_; }

  static bool try_lock(const Store& store, uint32_t lock_value = 1) {
    for (int attempt = 0; attempt < kMaxLockAttempts; ++attempt) {
      uint32_t current = 0;
      if (__atomic_compare_exchange_n(store.header + store::kHeaderLock, &current, lock_value, false, __ATOMIC_ACQUIRE,
                                      __ATOMIC_RELAXED)) {
        return true;
      }
      if (current != store::kCopying) return false;
      std::this_thread::yield();
    }
    return false;
  }
  static void unlock(const Store& store) { __atomic_store_n(store.header + store::kHeaderLock, 0u, __ATOMIC_RELEASE); }

 private:
  // This number of attempts takes about a minute. A header with random contents must not block a caller forever.
  static constexpr int kMaxLockAttempts = 1 << 26;

  const Store& store_;
  const bool locked_;
};

// The keys of the n-grams that end before a position, one for each ladder length up to the number of tokens.
struct NgramKeys {
  uint64_t values[kLadderLevels];
  uint32_t levels;
};
// Computes the keys for the text of `length` tokens that ends before `end`, in the scope with this seed.
NgramKeys compute_ngram_keys(const int32_t* end, int64_t length, uint64_t seed);

// An entry, and the number of equal tokens, at most 16, before the entry's position and at the end of the text looked
// up. Without a hit, `entry` is null.
struct StoreHit {
  store::Entry* entry;
  uint32_t match_len;
};

// A queue that inserts entries for tokens, in order. Entries are inserted in groups, after the memory for all tokens of
// a group has been prefetched.
class TokenInserter {
 public:
  explicit TokenInserter(const Store& store) : store_(store) {}

  // Adds the token at `position`, which must already be in its block.
  void add_token(uint32_t position, uint64_t scope, uint64_t seed);
  // Inserts the entries of all tokens in the queue.
  void flush();

 private:
  static constexpr uint32_t kGroupTokens = 32;
  struct Item {
    NgramKeys keys;
    uint64_t scope;
    uint32_t position;
  };

  const Store& store_;
  Item items_[kGroupTokens];
  uint32_t size_ = 0;
};

// Finds the entry of the n-gram at this level. The text of `length` tokens that ends before `end` contains the n-gram.
StoreHit find_hit(const Store& store, const NgramKeys& keys, uint32_t level, uint64_t scope, const int32_t* end,
                  int64_t length);
// Prefetches what find_hit() reads for the line's first entry with the n-gram's tag.
void prefetch_hit(const Store& store, const NgramKeys& keys, uint32_t level);

// Closes a slot. With visibility "finish", this function first inserts the entries of the request's text.
void close_slot(const Store& store, uint32_t slot_id, TokenInserter* inserter);

}  // namespace ngram_npu::cpu

// The offsets of a store's parts in words: slots, heads, lines, tokens, bytes, end. All 0 if the sizes are invalid.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits,
                                                      int64_t parts[6]);
// Creates an empty store in `words` zeroed words. Returns kInvalidParams if the memory is too small for these sizes.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots,
                                                        int64_t num_blocks, int64_t line_bits, uint32_t visibility);
// Returns a StoreFault (0: no fault); *location is the slot, block or line.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_check(const int32_t* store, int64_t words, int64_t* location);
// Writes the numbers of stored tokens, of blocks in use, and of slots with an open request.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_usage(const int32_t* store, int64_t words, int64_t usage[3]);
// Locks the store for the caller, as operators do. Returns false if another call has locked it or if it is invalid.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_ngram_store_lock(int32_t* store, int64_t words);
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_unlock(int32_t* store, int64_t words);
// Number of pieces in which a store's contents, without its slots, are copied to a file. Each piece is a consistent
// copy of a part of the store. Other calls may use the store between two pieces; if its epoch changes, the pieces are
// invalid. The pieces with the blocks are first, and the piece with the header is last.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* store, int64_t words);
constexpr int64_t kStorePieceWords = 1024 * (ngram_npu::store::kHeadWords + 256 + 64);
// Writes a piece of at most kStorePieceWords words. Returns its size in words; -1 if another call is using the store.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pack(int32_t* store, int64_t words, int64_t piece, uint32_t* output);
// Adds a piece to a store of the same sizes that was empty before the first piece and that no other call uses. Pieces
// must be added in order. Returns a StoreFault (0: no fault).
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_unpack(int32_t* store, int64_t words, int64_t piece,
                                                          const uint32_t* packed_words, int64_t count);
// Zeroes the text of a scope, or of all scopes if `scope` is null. The caller must have locked the store.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_clear(int32_t* store, int64_t words, const int64_t* scope);
// Closes all slots, so that later text begins in new blocks. Returns the next serial number, as if the blocks had never
// been renumbered. The caller must have locked the store.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_mark_update(int32_t* store, int64_t words);
// Zeroes the text that the store contained at an earlier call of ngram_npu_cpu_ngram_store_mark_update, which returned
// `mark`. The caller must have locked the store.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_drop(int32_t* store, int64_t words, int64_t mark);
