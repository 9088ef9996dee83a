// Layout of the store that requests share, and the functions on its entries. Definition: docs/ops/ngram_store_step.md;
// why: docs/design/store.md.
//
//   header  64 words
//   slots   num_slots x 4 words: the open requests
//   heads   num_blocks x 8 words: the state of each block
//   lines   2^line_bits x 16 words, from a multiple of 16 words on: the entries, eight per line
//   tokens  num_blocks x 256 words: the text
//   bytes   num_blocks x 64 words: one byte per token
//
// A position is a block's serial number times 256, plus the token's offset in the block. Serial numbers begin with 1
// and are assigned in order; the index of a block is its serial number modulo num_blocks. Ids are clamped before they
// are used, so even with corrupt contents a kernel never accesses memory outside the tensor.
#pragma once

#include "core/draft_costs.h"

// Few serial numbers: a test build in which they run out after a few thousand tokens.
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
constexpr uint32_t kOverlap = 16;  // tokens that a request's next block repeats from its previous one
constexpr uint32_t kEndOfSerials = 1u << NGRAM_STORE_SERIAL_BITS;
constexpr int64_t kMinBlocksPerSlot = 4;
constexpr int64_t kMaxBlocks = int64_t{1} << (NGRAM_STORE_SERIAL_BITS > 22 ? 20 : NGRAM_STORE_SERIAL_BITS - 2);
constexpr int64_t kMaxSlots = kMaxBlocks / kMinBlocksPerSlot;
constexpr uint32_t kMaxLineBits = 24;
// Tokens that a call adds besides the newly sampled ones: later prompts of a conversation.
constexpr int64_t kBacklogTokens = 4096;

enum Header : uint32_t {
  kHeaderMagic,
  kHeaderSlots,
  kHeaderBlocks,
  kHeaderLineBits,
  kHeaderVisibility,
  kHeaderNextSerial,
  kHeaderBusy,      // the lock: not 0 while a call uses the store; kCopying: a short copy, which only reads
  kStatLookups,     // statistics, which wrap
  kStatHits,        // lookups that found a candidate
  kStatDrafts,      // rows with a draft from the store
  kStatTokens,      // tokens of these drafts
  kStatEntered,     // tokens added
  kStatEvicted,     // entries overwritten while their block was alive
  kStatLostBlocks,  // slots closed because their block was no longer alive
  kStatRenumbered,  // number of times that all serial numbers had been used
  kStatBusy,        // calls that skipped the store because another call was using it
  kHeaderEpoch,     // changes whenever text that was already copied to a file changes
  kHeaderEnd,
};

constexpr uint32_t kCopying = 2;

enum Visibility : uint32_t { kLive = 0, kFinish = 1 };

// A slot: serial number of the request's newest block (0: no open request), and the number of its row's tokens that
// were stored or skipped.
enum Slot : uint32_t { kSlotSerial, kSlotLength };

enum Head : uint32_t {
  kHeadSerial,  // 0: the block is free
  kHeadFill,    // tokens in it
  kHeadFirst,   // number of these that are repeated from the previous block
  kHeadPrevious,
  kHeadNext,   // the next block, set when the request ends
  kHeadScope,  // two words
};

// An entry's words: tag << 8 | right << 4 | wrong, and the position of the predicted token; position 0: no entry.
constexpr uint32_t kMaxCount = 15;

struct Entry {
  uint32_t state;
  uint32_t position;
};

// Columns of a cost table [kCostRows, kStoreCostColumns]: first by outcome, for the later tokens of a draft; then by
// the numbers of right and wrong predictions, for the first token.
constexpr int64_t kFirstColumns = 24;
constexpr int64_t kStoreCostColumns = kCostColumns + kFirstColumns;

NGRAM_FN uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Base of the polynomial hash of a gram: the sum of its tokens times powers of the base, last token first.
constexpr uint64_t kBase = 0x9e3779b97f4a7c15u;

// The number to subtract from all serial numbers when no more are available: the maximum for which each live block
// keeps its index and a serial number above 0. The serial numbers of other blocks become 0.
NGRAM_FN uint32_t max_serial_offset(uint32_t num_blocks) {
  return (kEndOfSerials - num_blocks - 1) / num_blocks * num_blocks;
}
NGRAM_FN uint32_t renumber_serial(uint32_t serial, uint32_t offset) { return serial > offset ? serial - offset : 0; }

NGRAM_FN uint64_t scope_seed(uint64_t scope) { return mix(scope); }

// The top bits select the line, the low 24 bits are the tag.
NGRAM_FN uint64_t key_of(uint64_t gram, uint64_t seed, uint32_t level) {
  return mix((gram ^ seed) + (level + 1) * kBase);
}

// The entry after the token at `position` was equal to the predicted token (is_correct) or was another token.
NGRAM_FN Entry updated_entry(Entry entry, bool is_correct, uint32_t position) {
  uint32_t right = entry.state >> 4 & kMaxCount, wrong = entry.state & kMaxCount;
  if (is_correct) {
    entry.position = position;
    if (++right > kMaxCount) {
      right = 8;
      wrong /= 2;
    }
  } else if (++wrong > right + 1) {
    entry.position = position;
    right = 0;
    wrong = 1;
  } else if (wrong > kMaxCount) {
    wrong = 8;
    right /= 2;
  }
  entry.state = (entry.state & ~0xffu) | right << 4 | wrong;
  return entry;
}

// The column of a cost table for the first token of a draft.
NGRAM_FN int64_t first_token_column(uint32_t state) {
  const uint32_t right = state >> 4 & kMaxCount, wrong = state & kMaxCount;
  const int64_t right_class = right < 3 ? right : right < 5 ? 3 : right < 9 ? 4 : 5;
  const int64_t wrong_class = wrong < 2 ? wrong : wrong < 4 ? 2 : 3;
  return kCostColumns + right_class * 4 + wrong_class;
}

}  // namespace ngram_npu::store

namespace ngram_npu {

// ngram_store_step_: drafts from other requests' text and adds the sampled tokens. Contract:
// docs/ops/ngram_store_step.md.
struct StoreAccess {
  int32_t* words;  // core/store.h
  int64_t num_words;
};

struct NgramStoreStepParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  const int32_t* num_tokens;           // [R]
  const int32_t* num_sampled;          // [B]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot of a row is the row
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
  const int8_t* token_logits;
  bool fill;  // unused positions continue with the text after a draft from the store
};

// ngram_store_finish_: finishes requests. Contract: docs/ops/ngram_store_finish.md.
struct NgramStoreFinishParams {
  StoreAccess store;
  IndexArray slot_indices;  // [count], present
  int64_t count;
};

}  // namespace ngram_npu
