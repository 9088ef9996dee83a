// Looks up many rows with a few new tokens each (a step), and indexes one row with many tokens (a prompt). Both run
// SlotTable's walk after prefetching stages. Each stage prefetches what the next one reads, for several rows or tokens,
// so that their cache misses overlap. The prefetches are only hints, because the table may change after them.
#pragma once

#include <type_traits>

#include "cpu/ngram_index_table.h"

namespace ngram_npu::cpu {
namespace {

// Lookup options that are known at compile time. kLevels is 0 if the number of levels is known only at run time.
template <int kMatchValue, int kLevelsValue, bool kLadderValue = false>
struct LookupKind {
  static constexpr int kMatch = kMatchValue;
  static constexpr int kLevels = kLevelsValue;
  static constexpr bool kLadder = kLadderValue;
};

// Walks the ends of a row one after the other. operator() returns false if no memory is left.
template <int kMatch, class Table>
class PlainWalk {
 public:
  PlainWalk(const Arena&, const IndexOptions&, uint32_t, const int32_t*, uint32_t) {}

  bool operator()(Table& table, typename Table::Batch* batch, uint32_t i) {
    match_ = kMatch == kEarliest ? table.walk_earliest(batch, i) : table.walk_latest(batch, i);
    return !table.failed();
  }
  Match finish() const { return match_; }

 private:
  Match match_{-1, 0};
};

// The same with a ladder. Before a token is indexed, its outcome is recorded: whether the candidate predicted it.
template <class Table>
class LadderWalk {
 public:
  // `first` is the number of tokens that are already indexed.
  LadderWalk(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens, uint32_t first)
      : tokens_(tokens),
        outcomes_(arena, slot_id),
        candidate_(outcomes_.candidate(first)),
        records_outcomes_(options.outcomes) {}

  bool operator()(Table& table, typename Table::Batch* batch, uint32_t i) {
    const uint32_t end = batch->first + i;
    if (records_outcomes_ && !outcomes_.write(end, outcome_of(candidate_, tokens_, end))) return false;
    candidate_ = table.walk_latest(batch, i);
    return !table.failed();
  }
  Match finish() {
    outcomes_.set_candidate(candidate_);
    return candidate_;
  }

 private:
  const int32_t* const tokens_;
  Outcomes outcomes_;
  Match candidate_;
  const bool records_outcomes_;
};

// Prefetches the tokens before position `next`, which verify a hit, and the tokens after it, which begin a draft.
template <class Table>
void prefetch_tokens(const int32_t* tokens, uint32_t next) {
  __builtin_prefetch(tokens + next - smaller(next, Table::kVerifiedTokens));
  __builtin_prefetch(tokens + next);
}

// Prefetches the tokens that verify the likely entries, and the tokens of the draft. Returns the position that the
// deepest likely entry records; 0 if there is no such entry.
template <int kMatch, class Table>
uint32_t prefetch_hits(const Table& table, const typename Table::Batch& batch, uint32_t i, const int32_t* tokens,
                       uint32_t length, uint32_t draft_tokens) {
  if (kMatch == kEarliest) {  // the walk reads only the deepest entry
    const uint32_t next = smaller(table.likely_position(batch, i), length - 1);
    prefetch_tokens<Table>(tokens, next);
    if (draft_tokens > 0) __builtin_prefetch(tokens + smaller(next + draft_tokens, length) - 1);
    return next;
  }
  uint32_t next = 0;
  for (int level = 0; level < table.num_prefetched_levels(); ++level) {
    const uint32_t level_next = smaller(table.likely_position(batch, i, level), length - 1);
    if (level_next == 0) return next;
    next = level_next;
    prefetch_tokens<Table>(tokens, next);
  }
  table.prefetch_remaining_levels(batch, i);
  return next;
}

template <class Kind, class Table>
using WalkType = std::conditional_t<Kind::kLadder, LadderWalk<Table>, PlainWalk<Kind::kMatch, Table>>;

template <class Isa, class Kind>
void look_up_group(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  using Table = SlotTable<Isa, Kind::kLevels, kMaxPending, Kind::kLadder>;
  typename Table::Batch batches[kQueryGroup];
  const auto make_table = [&](const IndexQuery& q) { return Table(arena, options, q.slot_id, q.tokens); };

  for (int i = 0; i < count; ++i) {
    IndexQuery& q = queries[i];
    Table table = make_table(q);
    q.ok = table.ensure_table();
    table.make_keys(q.first, q.length - q.first, q.readable, &batches[i]);
    table.prefetch_directory(batches[i]);
    if (options.outcomes) Outcomes(arena, q.slot_id).prefetch(q.length - 1);
  }
  for (int i = 0; i < count; ++i) make_table(queries[i]).locate_lines(&batches[i]);
  for (int i = 0; i < count; ++i) {
    const IndexQuery& q = queries[i];
    const Table table = make_table(q);
    uint32_t next = 0;
    for (uint32_t j = 0; j < batches[i].size; ++j) {
      const uint32_t draft_tokens = j + 1 == batches[i].size ? static_cast<uint32_t>(k) : 0;
      next = prefetch_hits<Kind::kMatch>(table, batches[i], j, q.tokens, q.length, draft_tokens);
    }
    if (options.outcomes) Outcomes(arena, q.slot_id).prefetch(next);
  }
  for (int i = 0; i < count; ++i) {
    IndexQuery& q = queries[i];
    if (!q.ok) continue;
    Table table = make_table(q);
    WalkType<Kind, Table> walk(arena, options, q.slot_id, q.tokens, q.first);
    for (uint32_t j = 0; j < batches[i].size && q.ok; ++j) q.ok = walk(table, &batches[i], j);
    q.match = walk.finish();
  }
}

// Not inlined, because inlined together with the code for the next batch's keys, the walk would have too few registers.
template <class Table, class Walk>
__attribute__((noinline)) bool walk_batch(Table& table, typename Table::Batch* batch, Walk* walk) {
  const uint32_t size = batch->size;
  for (uint32_t i = 0; i < size; ++i) {
    if (!(*walk)(table, batch, i)) return false;
  }
  return true;
}

// Rows of up to this number of tokens (128 KiB) stay in the second-level cache while they are indexed.
constexpr uint32_t kMaxCachedTokens = 32768;

template <class Isa, class Kind>
bool extend_row(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                uint32_t readable, uint32_t first, uint32_t length) {
  constexpr uint32_t kWidth = 16;
  using Table = SlotTable<Isa, Kind::kLevels, kWidth, Kind::kLadder>;
  Table table(arena, options, slot_id, tokens);
  if (!table.ensure_table()) return false;
  WalkType<Kind, Table> walk(arena, options, slot_id, tokens, first);
  // The lines of the next batch are prefetched while the current batch is walked.
  typename Table::Batch batches[2];
  const auto prefetch_batch = [&](uint32_t begin, typename Table::Batch* batch) {
    table.make_keys(begin, smaller(kWidth, length - begin), readable, batch);
    table.locate_lines(batch);
  };
  prefetch_batch(first, &batches[0]);
  for (uint32_t begin = first, buffer = 0; begin < length; begin += kWidth, buffer ^= 1) {
    typename Table::Batch* batch = &batches[buffer];
    if (length - begin > kWidth) prefetch_batch(begin + kWidth, &batches[buffer ^ 1]);
    if (length > kMaxCachedTokens) {
      for (uint32_t i = 0; i < batch->size; ++i) prefetch_hits<Kind::kMatch>(table, *batch, i, tokens, length, 0);
    }
    if (!walk_batch(table, batch, &walk)) return false;
  }
  walk.finish();
  return true;
}

// Calls run(LookupKind) for these options. Ranges of 3 and 4 n-gram lengths, such as (2, 4) and (2, 5), have unrolled
// loops; all other ranges use the same code.
template <class Run>
auto call_with_kind(const IndexOptions& options, const Run& run) {
  if (options.ladder) return run(LookupKind<kLatest, kLadderLevels, true>());
  const bool earliest = options.match_policy == kEarliest;
  switch (options.max_n - options.min_n) {
    case 2: return earliest ? run(LookupKind<kEarliest, 3>()) : run(LookupKind<kLatest, 3>());
    case 3: return earliest ? run(LookupKind<kEarliest, 4>()) : run(LookupKind<kLatest, 4>());
    default: return earliest ? run(LookupKind<kEarliest, 0>()) : run(LookupKind<kLatest, 0>());
  }
}

template <class Isa>
void look_up(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  call_with_kind(options, [&](auto kind) { look_up_group<Isa, decltype(kind)>(arena, options, queries, count, k); });
}

template <class Isa>
bool extend(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens, uint32_t readable,
            uint32_t first, uint32_t length) {
  return call_with_kind(options, [&](auto kind) {
    return extend_row<Isa, decltype(kind)>(arena, options, slot_id, tokens, readable, first, length);
  });
}

}  // namespace
}  // namespace ngram_npu::cpu
