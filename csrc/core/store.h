// Layout of the store that requests share, and the functions on its entries. Definition: docs/ops/ngram_store_step.md.
// Rationale: docs/design/store.md.
//
//   header  64 words
//   slots   num_slots x 4 words: the open requests
//   heads   num_blocks x 8 words: the state of each block
//   lines   2^line_bits x 16 words, starting at a multiple of 16 words: the entries, eight per line
//   tokens  num_blocks x 256 words: the text
//   bytes   num_blocks x 64 words: the text's outcomes, one byte per token
//
// A position is a block's serial number times 256, plus the token's offset in the block. Serial numbers begin with 1
// and are assigned in order; the index of a block is its serial number modulo num_blocks. A block is alive until
// another block replaces it or its text is cleared. Slots and block indices are limited to the tensor's sizes before
// they are used, so even with corrupt contents a kernel never accesses memory outside the tensor.
#pragma once

#include "core/draft_costs.h"

// Number of bits of a serial number. Test builds use fewer bits, so that a few thousand tokens use up all numbers.
#ifndef NGRAM_STORE_SERIAL_BITS
#define NGRAM_STORE_SERIAL_BITS 24
#endif

namespace ngram_npu::store {

constexpr uint32_t kMagic = 0x31534e47;  // "GNS1"
constexpr int64_t kHeaderWords = 64;
constexpr int64_t kSlotWords = 4;
constexpr int64_t kHeadWords = 8;
constexpr int64_t kLineWords = 16;
constexpr uint32_t kLineEntries = 8;
constexpr uint32_t kBlockBits = 8;
constexpr uint32_t kBlockTokens = 1u << kBlockBits;
constexpr uint32_t kByteWords = kBlockTokens / 4;
constexpr uint32_t kOverlap = 16;  // tokens that a request's next block repeats from the request's previous block
constexpr uint32_t kEndOfSerials = 1u << NGRAM_STORE_SERIAL_BITS;
constexpr int64_t kMinBlocksPerSlot = 4;
constexpr int64_t kMaxBlocks = int64_t{1} << (NGRAM_STORE_SERIAL_BITS > 22 ? 20 : NGRAM_STORE_SERIAL_BITS - 2);
constexpr int64_t kMaxSlots = kMaxBlocks / kMinBlocksPerSlot;
constexpr uint32_t kMaxLineBits = 24;
// Maximum number of tokens that a call inserts for all rows together in addition to the newly sampled tokens, such as
// the prompt of a conversation's next turn.
constexpr int64_t kBacklogTokens = 4096;

enum Header : uint32_t {
  kHeaderMagic,
  kHeaderSlots,
  kHeaderBlocks,
  kHeaderLineBits,
  kHeaderVisibility,
  kHeaderNextSerial,
  kHeaderLock,        // 0: no call uses the store; kCopying: a piece is copied to a file; 1: any other call
  kStatLookups,       // rows that were looked up; this and the following statistics wrap
  kStatHits,          // lookups that found a candidate
  kStatDrafts,        // rows with a draft from the store
  kStatTokens,        // tokens of the drafts from the store
  kStatInserted,      // inserted tokens
  kStatEvicted,       // entries overwritten while their block was alive
  kStatLostBlocks,    // requests whose newest block had been replaced when their slot was closed
  kStatRenumberings,  // number of times that all blocks got new serial numbers because all numbers had been assigned
  kStatSkippedCalls,  // calls that skipped the store because another call was using it
  kHeaderEpoch,       // incremented when the pieces that were copied to a file become invalid
  kHeaderEnd,
};

constexpr uint32_t kCopying = 2;

// When entries are inserted for a request's text: immediately, or when the request finishes.
enum Visibility : uint32_t { kLive = 0, kFinish = 1 };

// Words of a slot: the serial number of the request's newest block (0: no open request), and the length up to which the
// request's row was stored or skipped.
enum Slot : uint32_t { kSlotSerial, kSlotLength };

enum Head : uint32_t {
  kHeadSerial,    // 0: the block is free
  kHeadFill,      // number of tokens in the block
  kHeadFirst,     // offset of the first token that is not repeated from the previous block
  kHeadPrevious,  // serial number of the request's previous block; 0 if there is none
  kHeadNext,      // serial number of the request's next block, set when the request finishes; 0 if there is none
  kHeadScope,     // low word of the scope; the high word follows
};

constexpr uint32_t kMaxCount = 15;  // maximum number of right or wrong predictions that an entry counts

struct Entry {
  uint32_t state;     // tag << 8 | number of right predictions << 4 | number of wrong predictions
  uint32_t position;  // position of the predicted token; 0: no entry
};

// Columns of a cost table [kCostRows, kStoreCostColumns]. For the first token of a draft, the numbers of right and
// wrong predictions select one of the last kFirstTokenColumns columns. For a later token, its outcome byte selects one
// of the first kRowCostColumns columns.
constexpr int64_t kFirstTokenColumns = 24;
constexpr int64_t kStoreCostColumns = kRowCostColumns + kFirstTokenColumns;

// The output function of splitmix64.
NGRAM_FN uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Base of the polynomial hash of an n-gram: the sum of token * base^j, where j is 0 for the n-gram's last token.
constexpr uint64_t kHashBase = 0x9e3779b97f4a7c15u;

// Returns the number to subtract from all serial numbers when all of them have been assigned. It is a
// multiple of num_blocks, so that no block moves: the largest one for which the serial numbers of all alive blocks stay
// above 0. The serial numbers of other blocks become 0.
NGRAM_FN uint32_t max_serial_offset(uint32_t num_blocks) {
  return (kEndOfSerials - num_blocks - 1) / num_blocks * num_blocks;
}
NGRAM_FN uint32_t renumber_serial(uint32_t serial, uint32_t offset) { return serial > offset ? serial - offset : 0; }

NGRAM_FN uint64_t scope_seed(uint64_t scope) { return mix(scope); }

// Key of an n-gram with this hash and level, in a scope with this seed. The top bits select the line, the low 24 bits
// are the tag.
NGRAM_FN uint64_t key_of(uint64_t ngram_hash, uint64_t seed, uint32_t level) {
  return mix((ngram_hash ^ seed) + (level + 1) * kHashBase);
}

// Returns the entry after an update with the token at `position`. is_correct: whether the entry predicted this token.
NGRAM_FN Entry updated_entry(Entry entry, bool is_correct, uint32_t position) {
  uint32_t num_right = entry.state >> 4 & kMaxCount, num_wrong = entry.state & kMaxCount;
  if (is_correct) {
    entry.position = position;
    if (++num_right > kMaxCount) {
      num_right = 8;
      num_wrong /= 2;
    }
  } else if (++num_wrong > num_right + 1) {
    entry.position = position;
    num_right = 0;
    num_wrong = 1;
  } else if (num_wrong > kMaxCount) {
    num_wrong = 8;
    num_right /= 2;
  }
  entry.state = (entry.state & ~0xffu) | num_right << 4 | num_wrong;
  return entry;
}

// The column of a cost table for the first token of a draft from an entry with this state.
NGRAM_FN int64_t first_token_column(uint32_t state) {
  const uint32_t num_right = state >> 4 & kMaxCount, num_wrong = state & kMaxCount;
  const int64_t right_class = num_right < 3 ? num_right : num_right < 5 ? 3 : num_right < 9 ? 4 : 5;
  const int64_t wrong_class = num_wrong < 2 ? num_wrong : num_wrong < 4 ? 2 : 3;
  return kRowCostColumns + right_class * 4 + wrong_class;
}

}  // namespace ngram_npu::store

namespace ngram_npu {

// The store tensor, with the layout above.
struct StoreAccess {
  int32_t* words;
  int64_t num_words;
};

// ngram_store_step_: replaces drafts by better drafts from the store's text and inserts the sampled tokens. Contract:
// docs/ops/ngram_store_step.md.
struct NgramStoreStepParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  const int32_t* num_tokens;           // [R]
  const int32_t* num_sampled;          // [B]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot has the row's number
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  StoreAccess store;
  TokenRows<int32_t> draft_token_ids;  // [B, k]
  int32_t* num_draft_tokens;           // [B]
  int32_t* match_len;                  // [B]
  TokenRows<uint8_t> draft_costs;      // [B, k]
  int64_t max_len;
  const void* costs;  // CostTable of [kCostRows, store::kStoreCostColumns]
  int64_t cost_limit;
  const int8_t* token_logits;  // as in CostTable
  bool fill;                   // positions after a draft from the store are filled with the text after the draft
};

// ngram_store_finish_: finishes requests. Contract: docs/ops/ngram_store_finish.md.
struct NgramStoreFinishParams {
  StoreAccess store;
  IndexArray slot_indices;  // [count], present
  int64_t count;
};

}  // namespace ngram_npu
