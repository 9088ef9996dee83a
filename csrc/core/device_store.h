// Layout of the device store, parameters of its operators, and the functions on its contents. Definition:
// docs/ops/device_store_append.md and docs/ops/device_store_propose.md; why: docs/design/device-store.md.
//
// Block numbers begin with 1 and only increase; the block with number b is in row b % N of `text` and `blocks`. The
// position of a token is the number of its block * kBlockTokens + its offset in the block. Numbers are compared before
// a block is used, and sizes are clamped, so a kernel stays inside the tensors whatever they contain.
#pragma once

#include "core/lookup_rules.h"
#include "core/store.h"

namespace ngram_npu {
namespace device_store {

constexpr int64_t kBlockTokens = 256;
constexpr int64_t kSizes = 6;      // rows of the table: n-grams of 1, 2, 3, 4, 8, 16 tokens
constexpr int64_t kMaxSize = 16;   // tokens of the longest n-gram
constexpr int64_t kSlotWords = 3;  // enum Slot
constexpr int64_t kHeadWords = 8;  // enum Head; the last two are unused, so that a head is one 32-byte sector
constexpr int64_t kMaxBlocks = int64_t{1} << 20;
constexpr int64_t kEndOfNumbers = int64_t{1} << 23;  // positions are below 2^31

// The request that writes to a slot: the number of its newest block (0: none), 1 + the number of its row's tokens that
// were stored or skipped (0: no request), and the hash of the tokens before that place.
enum Slot : int64_t { kSlotBlock, kSlotLength, kSlotHash };

enum Head : int64_t { kNumber, kPrevious, kNext, kFill, kScopeLow, kScopeHigh };

// The next block number before a call, and after it. Two words, so that no launch reads the word that it writes.
enum Allocator : int64_t { kNextNumber, kPlannedNumber, kAllocatorWords };

NGRAM_FN int32_t size_of_level(int64_t level) { return level < 4 ? static_cast<int32_t>(level) + 1 : 1 << (level - 1); }

// The level of n-grams of n tokens; -1 if the table has none.
NGRAM_FN int32_t level_of_size(int64_t n) {
  return n >= 1 && n <= 4 ? static_cast<int32_t>(n) - 1 : n == 8 ? 4 : n == 16 ? 5 : -1;
}

// The tensors that both operators use. Int is int32_t, or const int32_t if the store is only read.
template <class Int>
struct Contents {
  TokenRows<Int> text;    // [N, kBlockTokens]
  TokenRows<Int> blocks;  // [N, kHeadWords]
  TokenRows<Int> table;   // [kSizes, a power of two]: the newest position after an n-gram
};

// Hash of the last n tokens before `end`.
NGRAM_FN uint64_t hash_tokens(Gm<const int32_t> end, int64_t n) {
  uint64_t hash = 0, power = 1;
  for (int64_t j = 1; j <= n; ++j, power *= store::kHashBase) hash += static_cast<uint32_t>(end[-j]) * power;
  return hash;
}

NGRAM_FN int64_t table_column(uint64_t gram, uint64_t seed, int64_t level, int64_t columns) {
  return static_cast<int64_t>(store::key_of(gram, seed, static_cast<uint32_t>(level)) &
                              static_cast<uint64_t>(columns - 1));
}

// The place of block `number` > 0 in the ring. A 64-bit division would be a function call on a device.
template <class Int>
NGRAM_FN int64_t ring_row(const Contents<Int>& contents, int64_t number) {
  return static_cast<uint32_t>(number) % static_cast<uint32_t>(contents.blocks.rows);
}

// The row of the block with this number, if it is still in the ring and has this scope; otherwise -1.
template <class Int>
NGRAM_FN int64_t find_block(const Contents<Int>& contents, int64_t number, int64_t scope) {
  if (number <= 0) return -1;
  const int64_t row = ring_row(contents, number);
  const Gm<const int32_t> head = contents.blocks[row];
  const bool has_scope = head[kScopeLow] == static_cast<int32_t>(scope) &&
                         head[kScopeHigh] == static_cast<int32_t>(static_cast<uint64_t>(scope) >> 32);
  return head[kNumber] == number && has_scope ? row : -1;
}

template <class Int>
NGRAM_FN int64_t fill_of(const Contents<Int>& contents, int64_t row) {
  return smaller<int64_t>(larger<int64_t>(contents.blocks[row][kFill], 0), kBlockTokens);
}

}  // namespace device_store

// device_store_append_: stores new text and inserts its n-grams. Contract: docs/ops/device_store_append.md.
struct DeviceStoreAppendParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  Gm<const int32_t> num_sampled;       // [B]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot of a row is the row
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  TokenRows<int32_t> slots;  // [G, kSlotWords]
  device_store::Contents<int32_t> contents;
  Gm<int32_t> allocator;  // [kAllocatorWords]
  int64_t max_new;
  bool hold_back;
  Gm<void> workspace;  // device backends only: a DeviceStoreAppend per request
};

// What an append does for one request: it stores the tokens [begin, begin + count) of the row.
struct alignas(16) DeviceStoreAppend {
  int32_t is_active;  // 0: the request is ignored
  int32_t begin;      // less than 2^31: a row has as many tokens
  int32_t count;
  int32_t block;        // the block that the request writes to, while it has room; 0: none
  int32_t fill;         // tokens in that block
  int32_t num_before;   // tokens before `begin` in the request's text of the store, at most kMaxSize
  int32_t first_block;  // the number of its first new block
  int32_t num_blocks;   // new blocks
};

constexpr int64_t kDeviceStoreAppendWords = sizeof(DeviceStoreAppend) / sizeof(int32_t);
NGRAM_FN int64_t device_store_append_workspace_words(int64_t batch) { return kDeviceStoreAppendWords * batch; }

namespace device_store {

NGRAM_FN int64_t scope_of(const IndexArray& scopes, int64_t i) { return scopes.bytes == 0 ? 0 : scopes[i]; }

NGRAM_FN int64_t blocks_for_tokens(int64_t count) { return (count + kBlockTokens - 1) / kBlockTokens; }

NGRAM_FN int64_t slot_of(const DeviceStoreAppendParams& p, int64_t i) {
  return p.slot_indices.bytes == 0 ? p.row_indices[i] : p.slot_indices[i];
}

NGRAM_FN uint64_t seed_of_scope(int64_t scope) { return store::scope_seed(static_cast<uint64_t>(scope)); }

// Recognizes a request by the tokens before the place up to which its row is stored.
NGRAM_FN int32_t slot_hash(Gm<const int32_t> row, int64_t length, uint64_t seed) {
  const uint64_t gram = hash_tokens(row + length, smaller(length, kMaxSize));
  return static_cast<int32_t>(store::key_of(gram, seed, static_cast<uint32_t>(kSizes)));
}

// The next block number. All numbers from 1 on are free in a store of zeros.
NGRAM_FN int64_t next_number(const DeviceStoreAppendParams& p) {
  return smaller(larger<int64_t>(p.allocator[kNextNumber], 1), kEndOfNumbers);
}

// The number of blocks that one call may assign. Half of the ring keeps older text.
NGRAM_FN int64_t max_new_blocks(const DeviceStoreAppendParams& p) {
  return smaller(p.contents.blocks.rows / 2, kEndOfNumbers - next_number(p));
}

// Which tokens of request i are stored, and the block that it writes to; no new blocks are assigned yet.
NGRAM_FN DeviceStoreAppend begin_append(const DeviceStoreAppendParams& p, int64_t i) {
  const int64_t row = p.row_indices[i], slot = slot_of(p, i);
  if (p.num_sampled[i] <= 0 || !p.token_ids.has(row) || !p.slots.has(slot)) return {};
  const int64_t length = p.num_tokens[row];
  if (length < 1 || length > p.token_ids.capacity) return {};
  const int64_t num_old = length - smaller<int64_t>(p.num_sampled[i], length);
  const int64_t end = p.hold_back ? num_old : length;
  const int64_t scope = scope_of(p.scopes, i), stored = int64_t{p.slots[slot][kSlotLength]} - 1;
  DeviceStoreAppend append{};
  append.is_active = 1;
  const bool continues = stored >= 0 && stored <= end && end - stored <= p.max_new &&
                         p.slots[slot][kSlotHash] == slot_hash(p.token_ids[row], stored, seed_of_scope(scope));
  const int64_t begin = continues ? stored : larger(num_old, end - p.max_new);
  append.begin = static_cast<int32_t>(begin);
  append.count = static_cast<int32_t>(end - begin);
  const int32_t number = p.slots[slot][kSlotBlock];
  const int64_t found = continues && number < next_number(p) ? find_block(p.contents, number, scope) : -1;
  if (found < 0) return append;
  const int64_t fill = fill_of(p.contents, found);
  append.block = number;
  append.fill = static_cast<int32_t>(fill);
  append.num_before =
      static_cast<int32_t>(p.contents.blocks[found][kPrevious] > 0 ? kMaxSize : smaller(fill, kMaxSize));
  return append;
}

// Completes begin_append() once the call's limits are known, except for first_block. `reserved` is the number of blocks
// that this request and those before it in the batch would need if none continued a block, and `num_reserved` is the
// greatest such number that does not exceed max_new_blocks(): no block that the call may overwrite is continued.
NGRAM_FN void plan_blocks(const DeviceStoreAppendParams& p, int64_t reserved, int64_t num_reserved,
                          DeviceStoreAppend* append) {
  const bool fits = reserved <= num_reserved;
  if (!fits || append->block <= next_number(p) + num_reserved - 1 - p.contents.blocks.rows) {
    append->block = append->fill = append->num_before = 0;
  }
  if (!fits) {
    append->begin += append->count;
    append->count = 0;
  }
  const int64_t room = append->block > 0 ? kBlockTokens - append->fill : 0;
  append->num_blocks = static_cast<int32_t>(blocks_for_tokens(larger<int64_t>(append->count - room, 0)));
}

// The position of token t of an append.
NGRAM_FN int32_t position_of(const DeviceStoreAppend& append, int64_t t) {
  const int64_t offset = append.block > 0 ? append.fill + t : t;
  const int64_t chunk = offset / kBlockTokens;
  const int64_t number = append.block == 0 ? append.first_block + chunk
                         : chunk == 0      ? append.block
                                           : append.first_block + chunk - 1;
  return static_cast<int32_t>(number * kBlockTokens + offset % kBlockTokens);
}

// Stores token t of an append.
NGRAM_FN void write_token(const DeviceStoreAppendParams& p, const DeviceStoreAppend& append, int64_t row, int64_t t) {
  const int32_t position = position_of(append, t);
  p.contents.text[ring_row(p.contents, position / kBlockTokens)][position % kBlockTokens] =
      p.token_ids[row][append.begin + t];
}

// The entry of the n-gram before token t of an append, read from the request's own row: the ring may be written to at
// the same time. Null if the store does not have all tokens of the n-gram.
NGRAM_FN Gm<int32_t> find_entry(const DeviceStoreAppendParams& p, const DeviceStoreAppend& append, int64_t row,
                                uint64_t seed, int64_t t, int64_t level) {
  const int64_t n = size_of_level(level), end = append.begin + t;
  if (n > append.num_before + t || n > end) return nullptr;
  const uint64_t gram = hash_tokens(p.token_ids[row] + end, n);
  return p.contents.table[level] + table_column(gram, seed, level, p.contents.table.capacity);
}

// Writes the head of new block j of an append.
NGRAM_FN void write_head(const DeviceStoreAppendParams& p, const DeviceStoreAppend& append, int64_t scope, int64_t j) {
  const int64_t number = append.first_block + j;
  const int64_t room = append.block > 0 ? kBlockTokens - append.fill : 0;
  const Gm<int32_t> head = p.contents.blocks[ring_row(p.contents, number)];
  head[kNumber] = static_cast<int32_t>(number);
  head[kPrevious] = j > 0 ? static_cast<int32_t>(number - 1) : append.block;
  head[kNext] = j + 1 < append.num_blocks ? static_cast<int32_t>(number + 1) : 0;
  head[kFill] = static_cast<int32_t>(smaller(append.count - room - j * kBlockTokens, kBlockTokens));
  head[kScopeLow] = static_cast<int32_t>(scope);
  head[kScopeHigh] = static_cast<int32_t>(static_cast<uint64_t>(scope) >> 32);
}

// Writes the request's slot, and the head of the block that it continued.
NGRAM_FN void finish_append(const DeviceStoreAppendParams& p, const DeviceStoreAppend& append, int64_t i) {
  if (append.block > 0) {
    const Gm<int32_t> head = p.contents.blocks[ring_row(p.contents, append.block)];
    head[kFill] = static_cast<int32_t>(smaller<int64_t>(append.fill + append.count, kBlockTokens));
    if (append.num_blocks > 0) head[kNext] = append.first_block;
  }
  const int64_t end = append.begin + append.count;
  const Gm<int32_t> slot = p.slots[slot_of(p, i)];
  slot[kSlotBlock] = append.num_blocks > 0 ? append.first_block + append.num_blocks - 1 : append.block;
  slot[kSlotLength] = static_cast<int32_t>(end + 1);
  slot[kSlotHash] = slot_hash(p.token_ids[p.row_indices[i]], end, seed_of_scope(scope_of(p.scopes, i)));
}

}  // namespace device_store

// device_store_propose_: replaces a request's draft by one from the store after a longer match. Contract:
// docs/ops/device_store_propose.md.
struct DeviceStoreProposeParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  Gm<const int32_t> num_sampled;       // [B]
  IndexArray row_indices;              // [B]
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  device_store::Contents<const int32_t> contents;
  DraftRows draft_token_ids;  // [B, k]
  int64_t k;
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  int64_t max_len;
  bool fill;
};

namespace device_store {

// A request that looks up the end of its row. `length` is 0 if it does not.
struct Query {
  Gm<const int32_t> end;  // of the row's tokens
  int64_t length;         // of the row
  int64_t budget;         // maximum number of tokens of the draft
  int64_t scope;
};

NGRAM_FN Query query_of(const DeviceStoreProposeParams& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (p.num_sampled[i] <= 0 || !p.token_ids.has(row)) return {};
  const int64_t length = p.num_tokens[row];
  if (length < 1 || length > p.token_ids.capacity) return {};
  const int64_t budget = draft_budget(p.k, p.max_len, length);
  if (budget <= 0) return {};
  return {p.token_ids[row] + length, length, budget, scope_of(p.scopes, i)};
}

// The place in the store of an n-gram's next token.
struct Occurrence {
  int64_t row;       // of the next token's block; -1: the entry is not valid
  int64_t previous;  // row of the block that contains the beginning of the n-gram, or -1 if it is not needed
  int64_t offset;    // of the next token
};

// The occurrence of n tokens that an entry refers to, if the blocks that contain them and the next token are in the
// ring and have the scope. Its tokens are not compared yet.
NGRAM_FN Occurrence find_occurrence(const Contents<const int32_t>& contents, int32_t position, int64_t n,
                                    int64_t scope) {
  Occurrence found{find_block(contents, position / kBlockTokens, scope), -1, position % kBlockTokens};
  if (found.row < 0 || found.offset >= fill_of(contents, found.row)) return {-1, -1, 0};
  if (found.offset >= n) return found;
  found.previous = find_block(contents, contents.blocks[found.row][kPrevious], scope);
  const bool is_complete = found.previous >= 0 && fill_of(contents, found.previous) == kBlockTokens;
  return is_complete ? found : Occurrence{-1, -1, 0};
}

// Token j of the n-gram, counted from its end.
NGRAM_FN int32_t gram_token(const Contents<const int32_t>& contents, const Occurrence& found, int64_t j) {
  const int64_t at = found.offset - 1 - j;
  return at >= 0 ? contents.text[found.row][at] : contents.text[found.previous][kBlockTokens + at];
}

// The tokens that follow an occurrence: up to the end of the text in its block and in the next one. A draft has at most
// kMaxDraftTokens, so it ends there.
struct Continuation {
  int64_t row;
  int64_t offset;
  int64_t next;  // row of the next block, or -1
  int64_t count;
};

NGRAM_FN Continuation find_continuation(const Contents<const int32_t>& contents, const Occurrence& found,
                                        const Query& query) {
  Continuation draft{found.row, found.offset, -1, fill_of(contents, found.row) - found.offset};
  if (found.offset + draft.count == kBlockTokens && draft.count < query.budget) {
    draft.next = find_block(contents, contents.blocks[found.row][kNext], query.scope);
    if (draft.next >= 0) draft.count += fill_of(contents, draft.next);
  }
  draft.count = smaller(draft.count, query.budget);
  return draft;
}

// Writes position j of the draft of request i, whose match has n tokens, and with j = 0 its counts.
NGRAM_FN void write_draft_token(const DeviceStoreProposeParams& p, const Query& query, const Continuation& draft,
                                int32_t n, int64_t i, int64_t j) {
  int32_t token = p.fill ? query.end[-1] : kNoToken;
  if (j < draft.count) {
    const int64_t at = draft.offset + j;
    token = at < kBlockTokens ? p.contents.text[draft.row][at] : p.contents.text[draft.next][at - kBlockTokens];
  }
  p.draft_token_ids.set(i, j, token);
  if (j > 0) return;
  p.num_draft_tokens[i] = static_cast<int32_t>(draft.count);
  p.match_len[i] = n;
}

}  // namespace device_store
}  // namespace ngram_npu
