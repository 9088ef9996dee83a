// Looks up many rows with a few new tokens each (a step), and indexes one row with many tokens (a prompt). Both run
// SlotTable's walk after prefetching stages. Each stage prefetches what the next stage reads, for several rows or
// tokens, so that their cache misses overlap. The prefetches are only hints, because the table may change after them.
#pragma once

#include <type_traits>

#include "cpu/ngram_index_table.h"

namespace ngram_npu::cpu {
namespace {

// The lookup options that are known at compile time. kLevels is 0 if the number of levels is known only at run time.
template <int kMatchValue, int kLevelsValue, bool kLadderValue = false>
struct StaticOptions {
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
    return !table.has_failed();
  }
  Match finish() const { return match_; }

 private:
  Match match_{-1, 0};
};

// Walks the ends of a row with a ladder. Before a token is indexed, records whether the candidate predicted the token.
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
    return !table.has_failed();
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

// Prefetches the tokens before a position, which verify a hit, and the tokens after the position, which begin a draft.
template <class Table>
void prefetch_tokens(const int32_t* tokens, uint32_t position) {
  __builtin_prefetch(tokens + position - smaller(position, Table::kVerifiedTokens));
  __builtin_prefetch(tokens + position);
}

// Prefetches the tokens that verify the likely entries, and the tokens of the draft. Returns the position that the
// deepest likely entry records; 0 if there is no such entry.
template <int kMatch, class Table>
uint32_t prefetch_hits(const Table& table, const typename Table::Batch& batch, uint32_t i, const int32_t* tokens,
                       uint32_t length, uint32_t num_draft_tokens) {
  if (kMatch == kEarliest) {  // the walk reads only the deepest entry
    const uint32_t position = smaller(table.likely_position(batch, i), length - 1);
    prefetch_tokens<Table>(tokens, position);
    if (num_draft_tokens > 0) __builtin_prefetch(tokens + smaller(position + num_draft_tokens, length) - 1);
    return position;
  }
  uint32_t position = 0;
  for (int level = 0; level < table.num_prefetched_levels(); ++level) {
    const uint32_t level_position = smaller(table.likely_position(batch, i, level), length - 1);
    if (level_position == 0) return position;
    position = level_position;
    prefetch_tokens<Table>(tokens, position);
  }
  table.prefetch_remaining_levels(batch, i);
  return position;
}

template <class Options, class Table>
using WalkType = std::conditional_t<Options::kLadder, LadderWalk<Table>, PlainWalk<Options::kMatch, Table>>;

template <class Isa, class Options>
void look_up_group(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  using Table = SlotTable<Isa, Options::kLevels, kMaxPending, Options::kLadder>;
  typename Table::Batch batches[kQueryGroup];
  const auto make_table = [&](const IndexQuery& query) { return Table(arena, options, query.slot_id, query.tokens); };

  for (int i = 0; i < count; ++i) {
    IndexQuery& query = queries[i];
    Table table = make_table(query);
    query.has_memory = table.ensure_table();
    table.make_keys(query.first, query.length - query.first, query.readable_words, &batches[i]);
    table.prefetch_directory(batches[i]);
    if (options.outcomes) Outcomes(arena, query.slot_id).prefetch(query.length - 1);
  }
  for (int i = 0; i < count; ++i) make_table(queries[i]).locate_lines(&batches[i]);
  for (int i = 0; i < count; ++i) {
    const IndexQuery& query = queries[i];
    const Table table = make_table(query);
    uint32_t position = 0;
    for (uint32_t j = 0; j < batches[i].size; ++j) {
      const uint32_t num_draft_tokens = j + 1 == batches[i].size ? static_cast<uint32_t>(k) : 0;
      position = prefetch_hits<Options::kMatch>(table, batches[i], j, query.tokens, query.length, num_draft_tokens);
    }
    if (options.outcomes) Outcomes(arena, query.slot_id).prefetch(position);
  }
  for (int i = 0; i < count; ++i) {
    IndexQuery& query = queries[i];
    if (!query.has_memory) continue;
    Table table = make_table(query);
    WalkType<Options, Table> walk(arena, options, query.slot_id, query.tokens, query.first);
    for (uint32_t j = 0; j < batches[i].size && query.has_memory; ++j) query.has_memory = walk(table, &batches[i], j);
    query.match = walk.finish();
  }
}

// Not inlined, because the walk would have too few registers together with the code for the next batch's keys.
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

template <class Isa, class Options>
bool extend_row(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                uint32_t readable_words, uint32_t first, uint32_t length) {
  constexpr uint32_t kWidth = 16;
  using Table = SlotTable<Isa, Options::kLevels, kWidth, Options::kLadder>;
  Table table(arena, options, slot_id, tokens);
  if (!table.ensure_table()) return false;
  WalkType<Options, Table> walk(arena, options, slot_id, tokens, first);
  // The lines of the next batch are prefetched while the current batch is walked.
  typename Table::Batch batches[2];
  const auto prefetch_batch = [&](uint32_t begin, typename Table::Batch* batch) {
    table.make_keys(begin, smaller(kWidth, length - begin), readable_words, batch);
    table.locate_lines(batch);
  };
  prefetch_batch(first, &batches[0]);
  for (uint32_t begin = first, buffer = 0; begin < length; begin += kWidth, buffer ^= 1) {
    typename Table::Batch* batch = &batches[buffer];
    if (length - begin > kWidth) prefetch_batch(begin + kWidth, &batches[buffer ^ 1]);
    if (length > kMaxCachedTokens) {
      for (uint32_t i = 0; i < batch->size; ++i) prefetch_hits<Options::kMatch>(table, *batch, i, tokens, length, 0);
    }
    if (!walk_batch(table, batch, &walk)) return false;
  }
  walk.finish();
  return true;
}

// Calls run(StaticOptions) for these options. Ranges of 3 and 4 n-gram lengths, such as (2, 4) and (2, 5), have
// unrolled loops; all other ranges use the same code.
template <class Run>
auto call_with_static_options(const IndexOptions& options, const Run& run) {
  if (options.ladder) return run(StaticOptions<kLatest, kLadderLevels, true>());
  const bool is_earliest = options.match_policy == kEarliest;
  switch (options.max_n - options.min_n) {
    case 2: return is_earliest ? run(StaticOptions<kEarliest, 3>()) : run(StaticOptions<kLatest, 3>());
    case 3: return is_earliest ? run(StaticOptions<kEarliest, 4>()) : run(StaticOptions<kLatest, 4>());
    default: return is_earliest ? run(StaticOptions<kEarliest, 0>()) : run(StaticOptions<kLatest, 0>());
  }
}

template <class Isa>
void look_up(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  call_with_static_options(options, [&](auto static_options) {
    look_up_group<Isa, decltype(static_options)>(arena, options, queries, count, k);
  });
}

template <class Isa>
bool extend(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
            uint32_t readable_words, uint32_t first, uint32_t length) {
  return call_with_static_options(options, [&](auto static_options) {
    return extend_row<Isa, decltype(static_options)>(arena, options, slot_id, tokens, readable_words, first, length);
  });
}

}  // namespace
}  // namespace ngram_npu::cpu
