// CPU kernels of the store's operators: the definition that a device's kernels are compared with, and the store of
// runners without a device.
//
// Most of the time is cache misses: a step reads and writes entries at random places of a large table. The kernels
// therefore run in passes over many requests, and each pass prefetches what the next one reads.
#include "core/store.h"

#include <array>
#include <cstddef>
#include <new>
#include <vector>

using namespace ngram_npu;
using namespace ngram_npu::store;

namespace {

constexpr int64_t kQueryGroup = 32;  // requests whose lookups overlap

constexpr std::array<uint64_t, kMaxSize + 1> make_powers() {
  std::array<uint64_t, kMaxSize + 1> powers{1};
  for (size_t j = 1; j < powers.size(); ++j) powers[j] = powers[j - 1] * kHashBase;
  return powers;
}
constexpr auto kPowers = make_powers();

// The hashes of the n-grams of all sizes before a place of a row. Moving on by a token is much faster than hashing
// again. Tokens before the row's beginning count as 0.
class NgramHashes {
 public:
  NgramHashes(const int32_t* row, int64_t place) : next_(row + place), num_before_(place) {
    uint64_t hash = 0;
    for (int64_t level = 0, j = 0; level < kSizes; ++level) {
      for (const int64_t end = smaller<int64_t>(size_of_level(level), place); j < end; ++j)
        hash += static_cast<uint32_t>(next_[-1 - j]) * kPowers[static_cast<size_t>(j)];
      hashes_[level] = hash;
    }
  }

  uint64_t operator[](int64_t level) const { return hashes_[level]; }

  void advance() {
    for (int64_t level = 0; level < kSizes; ++level) {
      const int32_t n = size_of_level(level);
      const uint64_t oldest = num_before_ >= n ? static_cast<uint32_t>(next_[-n]) : 0;
      hashes_[level] =
          hashes_[level] * kHashBase + static_cast<uint32_t>(*next_) - oldest * kPowers[static_cast<size_t>(n)];
    }
    ++next_;
    ++num_before_;
  }

 private:
  const int32_t* next_;
  int64_t num_before_;  // tokens of the row
  uint64_t hashes_[kSizes];
};

// Prefetches the last tokens of the row of request i.
template <class Params>
void prefetch_row(const Params& p, int64_t i) {
  const int64_t row = p.row_indices[i];
  if (!p.token_ids.has(row)) return;
  const int64_t length = p.num_tokens[row];
  if (length < 1 || length > p.token_ids.capacity) return;
  __builtin_prefetch(p.token_ids[row] + length - 1);
  __builtin_prefetch(p.token_ids[row] + larger<int64_t>(length - kMaxSize - 1, 0));
}

void prefetch_slot(const StoreAppendParams& p, int64_t i) {
  const int64_t slot = slot_of(p, i);
  if (p.slots.has(slot)) __builtin_prefetch(p.slots[slot], 1);
}

// Prefetches the head of the block that request i may continue.
void prefetch_head(const StoreAppendParams& p, int64_t i) {
  const int64_t slot = slot_of(p, i);
  if (!p.slots.has(slot)) return;
  const int32_t number = p.slots[slot][kSlotBlock];
  if (number > 0) __builtin_prefetch(p.contents.blocks[ring_row(p.contents, number)], 1);
}

std::vector<StoreAppend> plan_appends(const StoreAppendParams& p, int64_t* next) {
  std::vector<StoreAppend> appends(static_cast<size_t>(p.batch));
  for (int64_t i = 0; i < p.batch; ++i) {
    prefetch_row(p, i);
    prefetch_slot(p, i);
  }
  for (int64_t i = 0; i < p.batch; ++i) prefetch_head(p, i);
  const int64_t limit = max_new_blocks(p);
  int64_t reserved = 0, num_reserved = 0;
  for (int64_t i = 0; i < p.batch; ++i) {
    StoreAppend& append = appends[static_cast<size_t>(i)];
    append = begin_append(p, i);
    reserved += blocks_for_tokens(append.count);
    if (reserved <= limit) num_reserved = reserved;
  }
  *next = next_number(p);
  reserved = 0;
  for (StoreAppend& append : appends) {
    reserved += blocks_for_tokens(append.count);
    if (append.is_active == 0) continue;
    plan_blocks(p, reserved, num_reserved, &append);
    append.first_block = static_cast<int32_t>(*next);
    *next += append.num_blocks;
  }
  return appends;
}

// A position to insert.
struct Insertion {
  int32_t* entry;
  int32_t position;
};

// Lists and prefetches the entries of all n-grams of the stored tokens.
std::vector<Insertion> list_insertions(const StoreAppendParams& p, const std::vector<StoreAppend>& appends) {
  int64_t num_tokens = 0;
  for (const StoreAppend& append : appends) num_tokens += append.count;
  std::vector<Insertion> insertions;
  insertions.reserve(static_cast<size_t>(num_tokens * kSizes));
  for (int64_t i = 0; i < p.batch; ++i) {
    const StoreAppend& append = appends[static_cast<size_t>(i)];
    if (append.count == 0) continue;
    const uint64_t seed = seed_of_scope(scope_of(p.scopes, i));
    NgramHashes hashes(p.token_ids[p.row_indices[i]], append.begin);
    for (int64_t t = 0; t < append.count; ++t, hashes.advance()) {
      const int32_t position = position_of(append, t);
      for (int64_t level = 0; level < kSizes && has_ngram(append, t, size_of_level(level)); ++level) {
        int32_t* const entry = entry_of(p.contents.table, hashes[level], seed, level);
        __builtin_prefetch(entry, 1);
        insertions.push_back({entry, position});
      }
    }
  }
  return insertions;
}

void append_batch(const StoreAppendParams& p) {
  int64_t next = 0;
  const std::vector<StoreAppend> appends = plan_appends(p, &next);
  const std::vector<Insertion> insertions = list_insertions(p, appends);
  for (int64_t i = 0; i < p.batch; ++i) {
    const StoreAppend& append = appends[static_cast<size_t>(i)];
    if (append.is_active == 0) continue;
    const int64_t row = p.row_indices[i], scope = scope_of(p.scopes, i);
    for (int64_t j = 0; j < append.num_blocks; ++j) write_head(p, append, scope, j);
    for (int64_t t = 0; t < num_written_tokens(append); ++t) write_token(p, append, row, t);
    finish_append(p, append, i);
  }
  for (const auto& [entry, position] : insertions)
    entry[kSecond] = larger(entry[kSecond], smaller(entry[kNewest], position));
  for (const auto& [entry, position] : insertions) entry[kNewest] = larger(entry[kNewest], position);
  p.allocator[kNextNumber] = p.allocator[kPlannedNumber] = static_cast<int32_t>(next);
}

// A request's lookup: the entries of the row's last n-grams that are longer than the request's own match.
struct Lookup {
  Query query;
  int32_t own_match;
  int64_t first_level, end_level;  // levels of these n-grams
  const int32_t* entries[kSizes];
};

void begin_lookup(const StoreProposeParams& p, int64_t i, Lookup* lookup) {
  const Query query = lookup->query = query_of(p, i);
  lookup->own_match = p.match_len[i];
  lookup->first_level = lookup->end_level = 0;
  if (query.length == 0) return;
  int64_t level = 0;
  while (level < kSizes && size_of_level(level) <= lookup->own_match) ++level;
  lookup->first_level = lookup->end_level = level;
  if (level == kSizes) return;
  const uint64_t seed = seed_of_scope(query.scope);
  const NgramHashes hashes(query.end - query.length, query.length);
  for (; level < kSizes && size_of_level(level) <= query.length; ++level) {
    lookup->entries[level] = entry_of(p.contents.table, hashes[level], seed, level);
    __builtin_prefetch(lookup->entries[level]);
  }
  lookup->end_level = level;
}

// The text before a position. Most entries are of another n-gram, which the first comparison of tokens shows.
const int32_t* text_before(const Contents<const int32_t>& contents, int32_t position) {
  return contents.text[ring_row(contents, position / kBlockTokens)] + position % kBlockTokens - 1;
}

void prefetch_text(const StoreProposeParams& p, const Lookup& lookup) {
  for (int64_t level = lookup.first_level; level < lookup.end_level; ++level) {
    for (const int64_t word : {kNewest, kSecond}) {
      const int32_t position = lookup.entries[level][word];
      if (position % kBlockTokens > 0) __builtin_prefetch(text_before(p.contents, position));
    }
  }
}

// The valid occurrence of n tokens before `position`.
Occurrence find_valid_occurrence(const StoreProposeParams& p, const Query& query, int32_t position, int64_t n) {
  if (position <= 0) return no_occurrence();
  if (position % kBlockTokens > 0 && *text_before(p.contents, position) != query.end[-1]) return no_occurrence();
  const Occurrence found = find_occurrence(p, query, position, n);
  if (found.row < 0) return no_occurrence();
  for (int64_t j = 0; j < n; ++j) {
    if (ngram_token(p.contents, found, j) != query.end[-1 - j]) return no_occurrence();
  }
  return found;
}

// The longest trusted n-gram, or else the longest one if the request has no match of its own.
StoreDraft choose_draft(const StoreProposeParams& p, const Lookup& lookup) {
  StoreDraft longest = no_draft();
  for (int64_t level = lookup.end_level; level-- > lookup.first_level;) {
    const int32_t n = size_of_level(level);
    const int32_t* const entry = lookup.entries[level];
    StoreDraft draft{n, find_valid_occurrence(p, lookup.query, entry[kNewest], n), no_occurrence()};
    if (draft.newest.row < 0) continue;
    draft.second = find_valid_occurrence(p, lookup.query, entry[kSecond], n);
    if (is_trusted(p.contents, draft, lookup.own_match)) return draft;
    if (longest.match_len == 0 && lookup.own_match == 0) longest = draft;
  }
  return longest;
}

void write_draft(const StoreProposeParams& p, const Lookup& lookup, const StoreDraft& draft, int64_t i) {
  p.agreement[i] = kOwnDraft;
  if (draft.match_len == 0) return;
  const Query& query = lookup.query;
  const Continuation newest = find_continuation(p.contents, query, draft.newest);
  const int32_t padding = padding_token(p, query);
  // A local copy, because the compiler assumes that writing an id may change p.draft_token_ids.bytes.
  const DraftRows output = p.draft_token_ids;
  int64_t count = 0;
  for (; count < newest.count && is_valid_token(newest[count], p.vocab_size); ++count)
    output.set(i, count, newest[count]);
  for (int64_t j = count; j < p.k; ++j) output.set(i, j, padding);
  p.num_draft_tokens[i] = static_cast<int32_t>(count);
  p.match_len[i] = draft.match_len;
  p.agreement[i] = kSingleOccurrence;
  if (draft.second.row < 0) return;
  const Continuation second = find_continuation(p.contents, query, draft.second);
  int32_t num_equal = 0;
  while (num_equal < smaller(count, second.count) && newest[num_equal] == second[num_equal]) ++num_equal;
  p.agreement[i] = num_equal;
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_store_append_(const StoreAppendParams* params, void*) {
  try {
    append_batch(*params);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;  // thrown before anything is written
  }
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_store_propose_(const StoreProposeParams* params, void*) {
  const StoreProposeParams& p = *params;
  for (int64_t first = 0; first < p.batch; first += kQueryGroup) {
    const int64_t size = smaller(p.batch - first, kQueryGroup);
    Lookup lookups[kQueryGroup];
    for (int64_t i = 0; i < size; ++i) prefetch_row(p, first + i);
    for (int64_t i = 0; i < size; ++i) begin_lookup(p, first + i, &lookups[i]);
    for (int64_t i = 0; i < size; ++i) prefetch_text(p, lookups[i]);
    for (int64_t i = 0; i < size; ++i) write_draft(p, lookups[i], choose_draft(p, lookups[i]), first + i);
  }
  return kOk;
}
