// Layout of the store that requests share, parameters of its operators, and the functions on its contents. Definition:
// docs/ops/store_append.md and docs/ops/store_propose.md; why: docs/design/store.md.
//
// Block numbers begin with 1 and only increase; the block with number b is in row b % N of `text` and `blocks`. The
// position of a token is the number of its block * kBlockTokens + its offset in the block. Numbers are compared before
// a block is used, and sizes are clamped, so a kernel stays inside the tensors whatever they contain.
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu {
namespace store {

constexpr int64_t kBlockTokens = 256;
constexpr int64_t kSizes = 6;       // rows of the table: n-grams of 1, 2, 3, 4, 8, 16 tokens
constexpr int64_t kMaxSize = 16;    // tokens of the longest n-gram
constexpr int64_t kSlotWords = 8;   // enum Slot; the others are unused, so that a slot is one 32-byte sector
constexpr int64_t kHeadWords = 8;   // enum Head; likewise
constexpr int64_t kEntryWords = 2;  // enum Entry
constexpr int64_t kMaxBlocks = int64_t{1} << 20;
constexpr int64_t kEndOfNumbers = int64_t{1} << 23;  // positions are below 2^31

// Requests with this scope neither store nor draft.
constexpr int64_t kPrivateScope = -1;

// The request that writes to a slot: the number of its newest block (0: none), 1 + the number of its row's tokens that
// were stored or skipped (0: no request), the hash of the row's last tokens, and the row's length.
enum Slot : int64_t { kSlotBlock, kSlotLength, kSlotHash, kSlotRowLength };

enum Head : int64_t { kNumber, kPrevious, kNext, kFill, kScopeLow, kScopeHigh };

// The positions after the newest and after the second newest occurrence of an n-gram; 0: none.
enum Entry : int64_t { kNewest, kSecond };

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
  TokenRows<Int> table;   // [kSizes, kEntryWords * a power of two]: the entries
};

// The output function of splitmix64.
NGRAM_FN uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Base of the polynomial hash of an n-gram: the sum of token * base^j, where j is 0 for the n-gram's last token.
constexpr uint64_t kHashBase = 0x9e3779b97f4a7c15u;

NGRAM_FN uint64_t seed_of_scope(int64_t scope) { return mix(static_cast<uint64_t>(scope)); }

// Key of an n-gram with this hash and level, in a scope with this seed.
NGRAM_FN uint64_t key_of(uint64_t ngram_hash, uint64_t seed, int64_t level) {
  return mix((ngram_hash ^ seed) + static_cast<uint64_t>(level + 1) * kHashBase);
}

// Hash of the last n tokens before `end`: a pointer, or a kernel's copy of the tokens.
template <class Tokens>
NGRAM_FN uint64_t hash_tokens(const Tokens& end, int64_t n) {
  uint64_t hash = 0;
  for (int64_t j = n; j > 0; --j) hash = hash * kHashBase + static_cast<uint32_t>(end[-j]);
  return hash;
}

// Calls visit(level, hash) for the n-grams before `end`, of up to max_size tokens. The hashes are computed together.
template <class Tokens, class Visit>
NGRAM_FN void for_each_ngram(const Tokens& end, int64_t max_size, const Visit& visit) {
  uint64_t hash = 0, power = 1;
  int64_t j = 0;
  for (int64_t level = 0; level < kSizes && size_of_level(level) <= max_size; ++level) {
    for (; j < size_of_level(level); ++j) {
      hash += static_cast<uint32_t>(static_cast<int32_t>(end[-1 - j])) * power;
      power *= kHashBase;
    }
    visit(level, hash);
  }
}

// The entry of an n-gram with this hash.
template <class Int>
NGRAM_FN Gm<Int> entry_of(const TokenRows<Int>& table, uint64_t ngram_hash, uint64_t seed, int64_t level) {
  const auto last_column = static_cast<uint64_t>(table.capacity / kEntryWords - 1);
  return table[level] + static_cast<int64_t>(key_of(ngram_hash, seed, level) & last_column) * kEntryWords;
}

// The place of block `number` > 0 in the ring. A 64-bit division would be a function call on a device.
template <class Int>
NGRAM_FN int64_t ring_row(const Contents<Int>& contents, int64_t number) {
  return static_cast<uint32_t>(number) % static_cast<uint32_t>(contents.blocks.rows);
}

// Whether this is the head of a block with this number and scope. Here and below, the type Head is a pointer to a head,
// or a kernel's copy of the head.
template <class Head>
NGRAM_FN bool is_block(const Head& head, int64_t number, int64_t scope) {
  const bool has_scope = head[kScopeLow] == static_cast<int32_t>(scope) &&
                         head[kScopeHigh] == static_cast<int32_t>(static_cast<uint64_t>(scope) >> 32);
  return head[kNumber] == number && has_scope;
}

// The row of the block with this number, if it is still in the ring and has this scope; otherwise -1.
template <class Int>
NGRAM_FN int64_t find_block(const Contents<Int>& contents, int64_t number, int64_t scope) {
  if (number <= 0) return -1;
  const int64_t row = ring_row(contents, number);
  return is_block(contents.blocks[row], number, scope) ? row : -1;
}

template <class Head>
NGRAM_FN int64_t fill_of_head(const Head& head) {
  return smaller<int64_t>(larger<int64_t>(head[kFill], 0), kBlockTokens);
}
template <class Int>
NGRAM_FN int64_t fill_of(const Contents<Int>& contents, int64_t row) {
  return fill_of_head(contents.blocks[row]);
}

}  // namespace store

// store_append_: stores new text and inserts its n-grams. Contract: docs/ops/store_append.md.
struct StoreAppendParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  Gm<const int32_t> num_sampled;       // [B]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot of a row is the row
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  TokenRows<int32_t> slots;  // [G, kSlotWords]
  store::Contents<int32_t> contents;
  Gm<int32_t> allocator;  // [kAllocatorWords]
  int64_t max_new;
  bool hold_back;
  Gm<void> workspace;  // device backends only: a StoreAppend per request
};

// What an append does for one request: it stores the tokens [begin, begin + count) of the row.
struct alignas(16) StoreAppend {
  int32_t is_active;  // 0: the request is ignored
  int32_t begin;      // less than 2^31: a row has as many tokens
  int32_t count;
  int32_t block;        // the block that the request writes to, while it has room; 0: none
  int32_t fill;         // tokens in that block
  int32_t num_before;   // tokens before `begin` in the request's text of the store, at most kMaxSize
  int32_t first_block;  // the number of its first new block
  int32_t num_blocks;   // new blocks
};

constexpr int64_t kStoreAppendWords = sizeof(StoreAppend) / sizeof(int32_t);
NGRAM_FN int64_t store_append_workspace_words(int64_t batch) { return kStoreAppendWords * batch; }

namespace store {

NGRAM_FN int64_t scope_of(const IndexArray& scopes, int64_t i) { return scopes.bytes == 0 ? 0 : scopes[i]; }

NGRAM_FN int64_t blocks_for_tokens(int64_t count) { return (count + kBlockTokens - 1) / kBlockTokens; }

NGRAM_FN int64_t slot_of(const StoreAppendParams& p, int64_t i) {
  return p.slot_indices.bytes == 0 ? p.row_indices[i] : p.slot_indices[i];
}

// Recognizes a request by the last tokens of its row in the slot's last call, when the row had `length` tokens.
template <class Tokens>
NGRAM_FN int32_t slot_hash(const Tokens& end, int64_t length, uint64_t seed) {
  return static_cast<int32_t>(key_of(hash_tokens(end, smaller(length, kMaxSize)), seed, kSizes));
}

// The next block number. All numbers from 1 on are free in a store of zeros.
NGRAM_FN int64_t next_number(const StoreAppendParams& p) {
  return smaller(larger<int64_t>(p.allocator[kNextNumber], 1), kEndOfNumbers);
}

// The number of blocks that one call may assign. Half of the ring keeps older text.
NGRAM_FN int64_t max_new_blocks(const StoreAppendParams& p) {
  return smaller(p.contents.blocks.rows / 2, kEndOfNumbers - next_number(p));
}

// A request that may store text.
struct AppendRequest {
  int64_t row;
  int64_t slot;
  int64_t scope;
  int64_t length;   // of the row; 0: the request is ignored
  int64_t num_old;  // the row's tokens before the step's new ones
};

NGRAM_FN AppendRequest append_request(const StoreAppendParams& p, int64_t i) {
  const int64_t row = p.row_indices[i], slot = slot_of(p, i), scope = scope_of(p.scopes, i);
  if (p.num_sampled[i] <= 0 || scope == kPrivateScope || !p.token_ids.has(row) || !p.slots.has(slot)) return {};
  const int64_t length = p.num_tokens[row];
  if (length < 1 || length > p.token_ids.capacity) return {};
  return {row, slot, scope, length, length - smaller<int64_t>(p.num_sampled[i], length)};
}

// Which tokens of a request are stored, and the number of the block that it looks for, if any. `slot` has the words of
// the request's slot; `old_end` is the end of the row's old tokens. Both are pointers, or copies in a kernel.
template <class Words, class Tokens>
NGRAM_FN StoreAppend choose_tokens(const StoreAppendParams& p, const AppendRequest& request, const Words& slot,
                                   const Tokens& old_end) {
  const int64_t num_old = request.num_old;
  const int64_t end = p.hold_back ? num_old : request.length;
  const int64_t stored = int64_t{slot[kSlotLength]} - 1;
  StoreAppend append{};
  append.is_active = 1;
  // A row that grew without this slot has another length. Its text is stored elsewhere, or was skipped.
  const bool continues = slot[kSlotRowLength] == num_old && stored >= 0 && stored <= end && end - stored <= p.max_new &&
                         slot[kSlotHash] == slot_hash(old_end, num_old, seed_of_scope(request.scope));
  const int64_t begin = continues ? stored : larger(num_old, end - p.max_new);
  append.begin = static_cast<int32_t>(begin);
  append.count = static_cast<int32_t>(end - begin);
  const int32_t number = slot[kSlotBlock];
  if (continues && number > 0 && number < next_number(p)) append.block = number;
  return append;
}

// Completes choose_tokens(): the request writes to the block that it looks for only if it finds the block. `head` is
// in the block's row.
template <class Head>
NGRAM_FN void continue_block(const Head& head, int64_t scope, StoreAppend* append) {
  if (!is_block(head, append->block, scope)) {
    append->block = 0;
    return;
  }
  const int64_t fill = fill_of_head(head);
  append->fill = static_cast<int32_t>(fill);
  append->num_before = static_cast<int32_t>(head[kPrevious] > 0 ? kMaxSize : smaller(fill, kMaxSize));
}

// Which tokens of request i are stored, and the block that it writes to; no new blocks are assigned yet.
NGRAM_FN StoreAppend begin_append(const StoreAppendParams& p, int64_t i) {
  const AppendRequest request = append_request(p, i);
  if (request.length == 0) return {};
  StoreAppend append = choose_tokens(p, request, p.slots[request.slot], p.token_ids[request.row] + request.num_old);
  if (append.block > 0) continue_block(p.contents.blocks[ring_row(p.contents, append.block)], request.scope, &append);
  return append;
}

// Tokens that fit into the block that an append continues.
NGRAM_FN int64_t room_of(const StoreAppend& append) { return append.block > 0 ? kBlockTokens - append.fill : 0; }

// Completes begin_append() once the call's limits are known, except for first_block. `reserved` is the number of blocks
// that this request and those before it in the batch would need if none continued a block, and `num_reserved` is the
// greatest such number that does not exceed max_new_blocks(): no block that the call may overwrite is continued.
NGRAM_FN void plan_blocks(const StoreAppendParams& p, int64_t reserved, int64_t num_reserved, StoreAppend* append) {
  const bool fits = reserved <= num_reserved;
  if (!fits || append->block <= next_number(p) + num_reserved - 1 - p.contents.blocks.rows) {
    append->block = append->fill = append->num_before = 0;
  }
  if (!fits) {
    append->begin += append->count;
    append->count = 0;
  }
  append->num_blocks = static_cast<int32_t>(blocks_for_tokens(larger<int64_t>(append->count - room_of(*append), 0)));
}

// The position of token t of an append.
NGRAM_FN int32_t position_of(const StoreAppend& append, int64_t t) {
  const int64_t offset = append.block > 0 ? append.fill + t : t;
  const int64_t chunk = offset / kBlockTokens;
  const int64_t number = append.block == 0 ? append.first_block + chunk
                         : chunk == 0      ? append.block
                                           : append.first_block + chunk - 1;
  return static_cast<int32_t>(number * kBlockTokens + offset % kBlockTokens);
}

// The number of tokens that write_token() writes: the stored ones, and zeros up to the end of a new block, which has
// the text of the block that it replaces.
NGRAM_FN int64_t num_written_tokens(const StoreAppend& append) {
  return append.num_blocks > 0 ? room_of(append) + append.num_blocks * kBlockTokens : append.count;
}

// Writes token t of an append.
NGRAM_FN void write_token(const StoreAppendParams& p, const StoreAppend& append, int64_t row, int64_t t) {
  const int32_t position = position_of(append, t);
  p.contents.text[ring_row(p.contents, position / kBlockTokens)][position % kBlockTokens] =
      t < append.count ? p.token_ids[row][append.begin + t] : 0;
}

// The largest n for which the store has the n tokens before token t of an append.
NGRAM_FN int64_t max_ngram_size(const StoreAppend& append, int64_t t) {
  return smaller<int64_t>(append.num_before, append.begin) + t;
}
NGRAM_FN bool has_ngram(const StoreAppend& append, int64_t t, int64_t n) { return n <= max_ngram_size(append, t); }

// The entry of the n-gram before token t of an append, read from the request's own row: the ring may be written to at
// the same time. Null if the store does not have all tokens of the n-gram.
NGRAM_FN Gm<int32_t> find_entry(const StoreAppendParams& p, const StoreAppend& append, int64_t row, uint64_t seed,
                                int64_t t, int64_t level) {
  const int64_t n = size_of_level(level);
  if (!has_ngram(append, t, n)) return nullptr;
  return entry_of(p.contents.table, hash_tokens(p.token_ids[row] + append.begin + t, n), seed, level);
}

// Sets the words of the head of new block j of an append.
template <class Head>
NGRAM_FN void set_new_head(const StoreAppend& append, int64_t scope, int64_t j, const Head& head) {
  const int64_t number = append.first_block + j;
  head[kNumber] = static_cast<int32_t>(number);
  head[kPrevious] = j > 0 ? static_cast<int32_t>(number - 1) : append.block;
  head[kNext] = j + 1 < append.num_blocks ? static_cast<int32_t>(number + 1) : 0;
  head[kFill] = static_cast<int32_t>(smaller(append.count - room_of(append) - j * kBlockTokens, kBlockTokens));
  head[kScopeLow] = static_cast<int32_t>(scope);
  head[kScopeHigh] = static_cast<int32_t>(static_cast<uint64_t>(scope) >> 32);
}

// Writes the head of new block j of an append.
NGRAM_FN void write_head(const StoreAppendParams& p, const StoreAppend& append, int64_t scope, int64_t j) {
  set_new_head(append, scope, j, p.contents.blocks[ring_row(p.contents, append.first_block + j)]);
}

// Sets the words that change in the head of the block that an append continued.
template <class Head>
NGRAM_FN void set_continued_head(const StoreAppend& append, const Head& head) {
  head[kFill] = static_cast<int32_t>(smaller<int64_t>(append.fill + append.count, kBlockTokens));
  if (append.num_blocks > 0) head[kNext] = append.first_block;
}

// Sets the words of the request's slot.
template <class Words>
NGRAM_FN void set_slot(const StoreAppendParams& p, const StoreAppend& append, int64_t i, const Words& slot) {
  const int64_t row = p.row_indices[i];
  const int32_t length = p.num_tokens[row];
  slot[kSlotBlock] = append.num_blocks > 0 ? append.first_block + append.num_blocks - 1 : append.block;
  slot[kSlotLength] = append.begin + append.count + 1;
  slot[kSlotHash] = slot_hash(p.token_ids[row] + length, length, seed_of_scope(scope_of(p.scopes, i)));
  slot[kSlotRowLength] = length;
}

// Writes the request's slot, and the head of the block that it continued.
NGRAM_FN void finish_append(const StoreAppendParams& p, const StoreAppend& append, int64_t i) {
  if (append.block > 0) set_continued_head(append, p.contents.blocks[ring_row(p.contents, append.block)]);
  set_slot(p, append, i, p.slots[slot_of(p, i)]);
}

}  // namespace store

// store_propose_: replaces a request's draft by one from the store. Contract: docs/ops/store_propose.md.
struct StoreProposeParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  Gm<const int32_t> num_tokens;        // [R]
  Gm<const int32_t> num_sampled;       // [B]
  IndexArray row_indices;              // [B]
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  store::Contents<const int32_t> contents;
  DraftRows draft_token_ids;  // [B, k]
  int64_t k;
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> match_len;         // [B]
  Gm<int32_t> agreement;         // [B]
  int64_t max_len;
  int64_t vocab_size;
  bool fill;
};

namespace store {

// Values of `agreement` that are not a number of tokens: the draft is not from the store; the n-gram has one
// occurrence.
constexpr int32_t kOwnDraft = -2;
constexpr int32_t kSingleOccurrence = -1;

// A single occurrence is trusted if the n-gram has at least kMinSingleSize tokens, or if the request's own match has
// less than kMinOwnMatch tokens.
constexpr int64_t kMinSingleSize = 8;
constexpr int64_t kMinOwnMatch = 2;

// A request that looks up the end of its row. `length` is 0 if it does not.
struct Query {
  Gm<const int32_t> end;  // of the row's tokens
  int64_t length;         // of the row
  int64_t budget;         // maximum number of tokens of the draft
  int64_t scope;
};

NGRAM_FN Query query_of(const StoreProposeParams& p, int64_t i) {
  const int64_t row = p.row_indices[i], scope = scope_of(p.scopes, i);
  if (p.num_sampled[i] <= 0 || scope == kPrivateScope || !p.token_ids.has(row)) return {};
  const int64_t length = p.num_tokens[row];
  if (length < 1 || length > p.token_ids.capacity) return {};
  const int64_t budget = draft_budget(p.k, p.max_len, length);
  if (budget <= 0) return {};
  return {p.token_ids[row] + length, length, budget, scope};
}

// The place in the store of an n-gram's next token.
struct Occurrence {
  int64_t row;       // of the next token's block; -1: the occurrence is not valid
  int64_t previous;  // row of the block that contains the beginning of the n-gram, or -1 if it is not needed
  int64_t offset;    // of the next token
};

// A function, because device code cannot use a constant of a class type.
NGRAM_FN Occurrence no_occurrence() { return {-1, -1, 0}; }

// The occurrence of n tokens before `position`, if the blocks that contain them and the next token are in the ring and
// have the request's scope, and the next token is a valid id. The n tokens are not compared yet.
NGRAM_FN Occurrence find_occurrence(const StoreProposeParams& p, const Query& query, int32_t position, int64_t n) {
  const Contents<const int32_t>& contents = p.contents;
  Occurrence found{find_block(contents, position / kBlockTokens, query.scope), -1, position % kBlockTokens};
  if (found.row < 0 || found.offset >= fill_of(contents, found.row)) return no_occurrence();
  if (!is_valid_token(contents.text[found.row][found.offset], p.vocab_size)) return no_occurrence();
  if (found.offset >= n) return found;
  found.previous = find_block(contents, contents.blocks[found.row][kPrevious], query.scope);
  const bool is_complete = found.previous >= 0 && fill_of(contents, found.previous) == kBlockTokens;
  return is_complete ? found : no_occurrence();
}

// Token j of the n-gram, counted from its end.
NGRAM_FN int32_t ngram_token(const Contents<const int32_t>& contents, const Occurrence& found, int64_t j) {
  const int64_t at = found.offset - 1 - j;
  return at >= 0 ? contents.text[found.row][at] : contents.text[found.previous][kBlockTokens + at];
}

// The tokens that follow an occurrence: up to the end of the text in its block and in the next one. A draft has at most
// kMaxDraftTokens, so it ends there.
struct Continuation {
  Gm<const int32_t> text;       // from the occurrence on
  Gm<const int32_t> next_text;  // of the next block
  int64_t num_in_block;         // tokens of `text`
  int64_t count;                // tokens, at most the budget

  NGRAM_FN int32_t operator[](int64_t j) const { return j < num_in_block ? text[j] : next_text[j - num_in_block]; }
};

NGRAM_FN Continuation find_continuation(const Contents<const int32_t>& contents, const Query& query,
                                        const Occurrence& found) {
  const int64_t num_in_block = fill_of(contents, found.row) - found.offset;
  Continuation text{contents.text[found.row] + found.offset, nullptr, num_in_block, num_in_block};
  if (found.offset + num_in_block == kBlockTokens && num_in_block < query.budget) {
    const int64_t next = find_block(contents, contents.blocks[found.row][kNext], query.scope);
    if (next >= 0) {
      text.next_text = contents.text[next];
      text.count += fill_of(contents, next);
    }
  }
  text.count = smaller(text.count, query.budget);
  return text;
}

// A draft from the store: the tokens after the newest occurrence of the row's last n tokens.
struct StoreDraft {
  int32_t match_len;  // n; 0: no draft
  Occurrence newest;
  Occurrence second;  // row -1: not valid
};

NGRAM_FN StoreDraft no_draft() { return {0, no_occurrence(), no_occurrence()}; }

// Whether an n-gram is taken before any shorter one.
NGRAM_FN bool is_trusted(const Contents<const int32_t>& contents, const StoreDraft& draft, int64_t own_match) {
  const Occurrence &a = draft.newest, &b = draft.second;
  if (b.row < 0) return own_match < kMinOwnMatch || draft.match_len >= kMinSingleSize;
  return contents.text[a.row][a.offset] == contents.text[b.row][b.offset];
}

// The token for positions after a draft.
NGRAM_FN int32_t padding_token(const StoreProposeParams& p, const Query& query) {
  return p.fill ? padding_after(query.end[-1], p.vocab_size) : kNoToken;
}

}  // namespace store
}  // namespace ngram_npu
