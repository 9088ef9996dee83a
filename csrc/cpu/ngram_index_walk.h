// Rows through their tables: many rows by a few tokens (a step), and one row by many (a prompt). Both are loops around
// SlotTable's walk, run behind prefetches: what a stage fetches, a later one finds in the cache, while the misses of
// the other rows, or tokens, overlap. The early stages only look, so that nothing they saw need still be true later.
#pragma once

#include "cpu/ngram_index_table.h"

namespace ngram_npu::cpu {
namespace {

template <int kMatch, class Table>
Occurrence walk(Table& table, typename Table::Batch* batch, uint32_t i) {
  return kMatch == kEarliest ? table.walk_earliest(batch, i) : table.walk_latest(batch, i);
}

// Fetches what common_suffix8 reads before `start`, often two lines, and what a draft would begin with.
inline void prefetch_tokens(const int32_t* tokens, uint32_t start) {
  __builtin_prefetch(tokens + start - smaller(start, 8u));
  __builtin_prefetch(tokens + start);
}

// Fetches the tokens that verifying the likely hits will read, and those a draft would be copied from.
template <int kMatch, class Table>
void prefetch_hits(const Table& table, const typename Table::Batch& batch, uint32_t i, const int32_t* tokens,
                   uint32_t length, uint32_t reach) {
  if (kMatch == kEarliest) {  // only the deepest is looked at
    const uint32_t start = smaller(table.peek(batch, i), length - 1);
    prefetch_tokens(tokens, start);
    if (reach > 0) __builtin_prefetch(tokens + smaller(start + reach, length) - 1);
  } else {
    for (int level = 0; level < table.levels(); ++level) {
      prefetch_tokens(tokens, smaller(table.peek(batch, i, level), length - 1));
    }
  }
}

template <class Isa, int kMatch, int kLevels>
void look_up_group(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  using Table = SlotTable<Isa, kLevels, kMaxPending>;
  typename Table::Batch batches[kQueryGroup];
  const auto table_of = [&](const IndexQuery& q) { return Table(arena, options, q.slot_id, q.tokens); };

  for (int i = 0; i < count; ++i) {
    IndexQuery& q = queries[i];
    Table table = table_of(q);
    q.ok = table.ensure_table();
    table.make_keys(q.first, q.length - q.first, q.readable, &batches[i]);
    table.prefetch_directory(batches[i]);
  }
  for (int i = 0; i < count; ++i) table_of(queries[i]).locate(&batches[i]);
  for (int i = 0; i < count; ++i) {
    const IndexQuery& q = queries[i];
    const Table table = table_of(q);
    for (uint32_t j = 0; j < batches[i].size; ++j) {
      const uint32_t reach = j + 1 == batches[i].size ? static_cast<uint32_t>(k) : 0;
      prefetch_hits<kMatch>(table, batches[i], j, q.tokens, q.length, reach);
    }
  }
  for (int i = 0; i < count; ++i) {
    IndexQuery& q = queries[i];
    if (!q.ok) continue;
    Table table = table_of(q);
    for (uint32_t j = 0; j < batches[i].size; ++j) q.found = walk<kMatch>(table, &batches[i], j);
    q.ok = !table.failed();
  }
}

// Rows up to this long (128 KiB) stay in the second-level cache while they are indexed.
constexpr uint32_t kNearTokens = 32768;

template <class Isa, int kMatch, int kLevels>
bool extend_row(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                uint32_t readable, uint32_t first, uint32_t length) {
  constexpr uint32_t kWidth = 16;
  using Table = SlotTable<Isa, kLevels, kWidth>;
  Table table(arena, options, slot_id, tokens);
  if (!table.ensure_table()) return false;
  // While one batch is walked, the lines of the next arrive.
  typename Table::Batch batches[2];
  const auto fetch = [&](uint32_t begin, typename Table::Batch* batch) {
    table.make_keys(begin, smaller(kWidth, length - begin), readable, batch);
    table.locate(batch);
  };
  fetch(first, &batches[0]);
  for (uint32_t begin = first, turn = 0; begin < length; begin += kWidth, turn ^= 1) {
    typename Table::Batch* batch = &batches[turn];
    if (length - begin > kWidth) fetch(begin + kWidth, &batches[turn ^ 1]);
    if (length > kNearTokens) {
      for (uint32_t i = 0; i < batch->size; ++i) prefetch_hits<kMatch>(table, *batch, i, tokens, length, 0);
    }
    for (uint32_t i = 0; i < batch->size; ++i) {
      walk<kMatch>(table, batch, i);
      if (table.failed()) return false;
    }
  }
  return true;
}

template <class Isa, int kLevels>
void look_up_levels(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  const auto group =
      options.match_policy == kEarliest ? look_up_group<Isa, kEarliest, kLevels> : look_up_group<Isa, kLatest, kLevels>;
  group(arena, options, queries, count, k);
}

template <class Isa, int kLevels>
bool extend_levels(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                   uint32_t readable, uint32_t first, uint32_t length) {
  const auto row =
      options.match_policy == kEarliest ? extend_row<Isa, kEarliest, kLevels> : extend_row<Isa, kLatest, kLevels>;
  return row(arena, options, slot_id, tokens, readable, first, length);
}

// The spans in use, (2, 4) and (2, 5) among them, have their loops unrolled; the others share one version.
template <class Isa>
void look_up(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k) {
  switch (options.max_n - options.min_n) {
    case 2: return look_up_levels<Isa, 3>(arena, options, queries, count, k);
    case 3: return look_up_levels<Isa, 4>(arena, options, queries, count, k);
    default: return look_up_levels<Isa, 0>(arena, options, queries, count, k);
  }
}

template <class Isa>
bool extend(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens, uint32_t readable,
            uint32_t first, uint32_t length) {
  switch (options.max_n - options.min_n) {
    case 2: return extend_levels<Isa, 3>(arena, options, slot_id, tokens, readable, first, length);
    case 3: return extend_levels<Isa, 4>(arena, options, slot_id, tokens, readable, first, length);
    default: return extend_levels<Isa, 0>(arena, options, slot_id, tokens, readable, first, length);
  }
}

}  // namespace
}  // namespace ngram_npu::cpu
