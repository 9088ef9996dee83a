// Rules and layout of the store that requests share. Definition: docs/ops/ngram_store_step.md; why:
// docs/design/store.md.
//
//   header  64 words
//   slots   num_slots x 4 words: the open requests
//   heads   num_blocks x 8 words: the state of each block
//   lines   2^line_bits x 16 words, from a multiple of 16 words on: the entries, eight per line
//   tokens  num_blocks x 256 words: the text
//   bytes   num_blocks x 64 words: one byte per token
//
// A place is a block's serial number times 256, plus the token's offset in the block. Serial numbers begin with 1 and
// are assigned in order; the block of a serial number is at that number modulo num_blocks. Ids are clamped where they
// are used, so that even corrupt contents never lead a kernel outside the tensor.
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
constexpr int64_t kLeastBlocksPerSlot = 4;
constexpr int64_t kMaxBlocks = int64_t{1} << (NGRAM_STORE_SERIAL_BITS > 22 ? 20 : NGRAM_STORE_SERIAL_BITS - 2);
constexpr int64_t kMaxSlots = kMaxBlocks / kLeastBlocksPerSlot;
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
  kHeaderBusy,      // not 0 while a call uses the store; kCopied: for a moment, and it only reads
  kStatLookups,     // statistics, which wrap
  kStatHits,        // lookups that found a candidate
  kStatDrafts,      // rows with a draft from the store
  kStatTokens,      // tokens of these drafts
  kStatEntered,     // tokens added
  kStatEvicted,     // entries overwritten while their block was alive
  kStatLostBlocks,  // slots closed because their block was no longer alive
  kStatRenumbered,  // times that the serial numbers had run out
  kStatBusy,        // calls that skipped the store because another call was using it
  kHeaderEpoch,     // changes whenever text that a piece of a file has is no longer what it was
  kHeaderEnd,
};

constexpr uint32_t kCopied = 2;

enum Visibility : uint32_t { kLive = 0, kFinish = 1 };

// A slot: the request's newest block (0: none is open), and how many of its row's tokens are stored or were skipped.
enum Slot : uint32_t { kSlotSerial, kSlotLength };

enum Head : uint32_t {
  kHeadSerial,  // 0: the block is free
  kHeadFill,    // tokens in it
  kHeadFirst,   // number of these that are repeated from the previous block
  kHeadPrevious,
  kHeadNext,   // the next block, set when the request ends
  kHeadScope,  // two words
};

// An entry's words: tag << 8 | right << 4 | wrong, and the place of the expected token; place 0: no entry.
constexpr uint32_t kMaxCount = 15;

struct Entry {
  uint32_t state;
  uint32_t place;
};

// Columns of a table of costs [kCostRows, kStoreCostColumns]: for later tokens of a draft by outcome, then for the
// first token by the numbers of times that it was right and wrong.
constexpr int64_t kFirstColumns = 24;
constexpr int64_t kStoreCostColumns = kCostColumns + kFirstColumns;

NGRAM_FN uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Base of the polynomial hash of a gram: the sum of its tokens times powers of this, last token first.
constexpr uint64_t kBase = 0x9e3779b97f4a7c15u;

// What is subtracted from all serial numbers when they have run out: the most that leaves each live one above 0 and in
// its block. What is no longer alive becomes 0.
NGRAM_FN uint32_t renumbering(uint32_t num_blocks) {
  return (kEndOfSerials - num_blocks - 1) / num_blocks * num_blocks;
}
NGRAM_FN uint32_t renumbered(uint32_t serial, uint32_t by) { return serial > by ? serial - by : 0; }

NGRAM_FN uint64_t scope_seed(uint64_t scope) { return mix(scope); }

// The top bits select the line, the low 24 bits are the tag.
NGRAM_FN uint64_t key_of(uint64_t gram, uint64_t seed, uint32_t level) {
  return mix((gram ^ seed) + (level + 1) * kBase);
}

// The entry after its expected token came (`same`) or another token at `place`.
NGRAM_FN Entry updated(Entry entry, bool same, uint32_t place) {
  uint32_t right = entry.state >> 4 & kMaxCount, wrong = entry.state & kMaxCount;
  if (same) {
    entry.place = place;
    if (++right > kMaxCount) {
      right = 8;
      wrong /= 2;
    }
  } else if (++wrong > right + 1) {
    entry.place = place;
    right = 0;
    wrong = 1;
  } else if (wrong > kMaxCount) {
    wrong = 8;
    right /= 2;
  }
  entry.state = (entry.state & ~0xffu) | right << 4 | wrong;
  return entry;
}

// The column of a table of costs for the first token of a draft.
NGRAM_FN int64_t first_column(uint32_t state) {
  const uint32_t right = state >> 4 & kMaxCount, wrong = state & kMaxCount;
  const int64_t h = right < 3 ? right : right < 5 ? 3 : right < 9 ? 4 : 5;
  const int64_t m = wrong < 2 ? wrong : wrong < 4 ? 2 : 3;
  return kCostColumns + h * 4 + m;
}

}  // namespace ngram_npu::store

namespace ngram_npu {

// ngram_store_step_: draft from other requests' text, and add the sampled tokens. Contract:
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
  bool fill;  // after a draft from the store its text continues
};

// ngram_store_finish_: finish requests. Contract: docs/ops/ngram_store_finish.md.

struct NgramStoreFinishParams {
  StoreAccess store;
  IndexArray slot_indices;  // [count], present
  int64_t count;
};

}  // namespace ngram_npu
