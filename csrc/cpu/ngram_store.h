// Operations on the store's tensor: allocating blocks, finding grams, entering tokens; and the calls that make, check
// and clear a store. The operators themselves are in ngram_store_{step,finish}.cpp.
//
// A store with an invalid header is not an error, because its contents are data: the operators do nothing.
#pragma once

#include <cstddef>
#include <thread>

#include "core/store.h"

namespace ngram_npu {

// What ngram_npu_cpu_ngram_store_check finds.
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

// The tensor's parts. Only its size and what open_store derived from it are trusted, never its contents.
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

// The offsets of the layout's parts in words. `end` 0: a store cannot have these sizes.
struct StoreParts {
  int64_t slots, heads, lines, tokens, bytes, end;
};
StoreParts store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits);

// False if the header does not match the tensor.
bool open_store(int32_t* words, int64_t num_words, Store* store);

// What is wrong with the blocks and the serial numbers; *where is the block.
StoreFault check_blocks(const Store& store, int64_t* where);
// Removes all text and closes all requests.
void forget_all(const Store& store);
// Gives all blocks small serial numbers again, in the same order.
void renumber(const Store& store);
// The first place with a block that may be alive. Clearing a block removes its entries, so of an entry's block this
// decides.
uint32_t oldest_place(const Store& store);
// Counts a call that skipped the store.
void count_busy(const Store& store);

// Exclusive use of a store by one call; false if another call is using it. A copy for a file is waited for.
class StoreUse {
 public:
  explicit StoreUse(const Store& store) : store_(store), got_(take(store)) {}
  ~StoreUse() {
    if (got_) give_back(store_);
  }
  StoreUse(const StoreUse&) = delete;
  StoreUse& operator=(const StoreUse&) = delete;
  explicit operator bool() const { return got_; }

  static bool take(const Store& store, uint32_t how = 1) {
    for (int tries = 0; tries < kPatience; ++tries) {
      uint32_t state = 0;
      if (__atomic_compare_exchange_n(store.header + store::kHeaderBusy, &state, how, false, __ATOMIC_ACQUIRE,
                                      __ATOMIC_RELAXED)) {
        return true;
      }
      if (state != store::kCopied) return false;
      std::this_thread::yield();
    }
    return false;
  }
  static void give_back(const Store& store) {
    __atomic_store_n(store.header + store::kHeaderBusy, 0u, __ATOMIC_RELEASE);
  }

 private:
  static constexpr int kPatience = 1 << 26;  // a minute or so: a header with random contents must not block a call

  const Store& store_;
  const bool got_;
};

// The keys of the grams that end before a place, one for each size that fits.
struct GramKeys {
  uint64_t of[kLadderLevels];
  uint32_t levels;
};
// `end`: one past the last of `length` tokens.
GramKeys keys_before(const int32_t* end, int64_t length, uint64_t seed);

// An entry and the number of tokens that agree before its place, at most 16; entry null: no hit.
struct StoreHit {
  store::Entry* entry;
  uint32_t agreed;
};

// A queue of tokens to enter, in order. The memory for one token is prefetched while others are entered.
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
// Prefetches what find_hit will read of the line.
void prefetch_hit(const Store& store, const GramKeys& keys, uint32_t level);

// Closes the slot of a finished request: enters the text that was not visible yet.
void close_slot(const Store& store, uint32_t slot_id, Entering* entering);

}  // namespace ngram_npu::cpu

// The offsets of a store's parts in words: slots, heads, lines, tokens, bytes, end. All 0 if a store cannot have these
// sizes.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits,
                                                      int64_t parts[6]);
// Makes an empty store from `words` ZEROED words. kInvalidParams if they are too few for these sizes.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots,
                                                        int64_t num_blocks, int64_t line_bits, uint32_t visibility);
// Returns 0 or a StoreFault; *where is the slot, block or entry.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_check(const int32_t* store, int64_t words, int64_t* where);
// Writes the number of stored tokens, of live blocks, and of slots with an open request.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_usage(const int32_t* store, int64_t words, int64_t usage[3]);
// Locks the store for the caller, as operators do; false if another call holds the lock, or it is not a store.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_ngram_store_take(int32_t* store, int64_t words);
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_give_back(int32_t* store, int64_t words);
// A store's contents without its slots, in pieces for a file. Each is a consistent copy of a part, of words; the store
// may be used between two of them, unless its epoch changes. Those of the blocks come first, the header's is the last.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pieces(const int32_t* store, int64_t words);
constexpr int64_t kStorePieceWords = 1024 * (ngram_npu::store::kHeadWords + 256 + 64);
// Writes at most kStorePieceWords words and returns their number; -1: another call is using the store.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_store_pack(int32_t* store, int64_t words, int64_t piece, uint32_t* to);
// Puts pieces in their order into an empty store of the same sizes that is not in use. 0 or a StoreFault.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_unpack(int32_t* store, int64_t words, int64_t piece,
                                                          const uint32_t* from, int64_t count);
// Wipes the text of a scope, or (null) of all. The caller holds the lock.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_clear(int32_t* store, int64_t words, const int64_t* scope);
