// Drafts from the store that requests share, and inserts their new text. Definitions: docs/ops/ngram_store_step.md,
// "Draft" and "Inserting".
#pragma once

#include "cpu/host_drafting.h"
#include "cpu/ngram_store.h"

namespace ngram_npu::cpu {

struct StoredRow {
  const int32_t* tokens;  // null: the row is skipped
  int64_t length;
  uint64_t scope;
};

// Returns the row of a request with this number of new tokens. `tokens` is null if the row must be skipped.
inline StoredRow make_stored_row(const TokenRows<const int32_t>& rows, int64_t row, const int32_t* num_tokens,
                                 int32_t num_sampled, int64_t scope) {
  if (!rows.has(row) || num_sampled <= 0 || num_tokens[row] < 1 || num_tokens[row] > rows.capacity) return {};
  return {rows[row], num_tokens[row], static_cast<uint64_t>(scope)};
}

// Inserts the new tokens of rows.
void insert_rows(const StoreInsertParams& params);

// A row to look up, the keys of its last n-grams, and its hit in the store.
struct StoreQuery {
  StoredRow row;
  NgramKeys keys;
  StoreHit hit;
};

// The draft of a hit: the first `count` of the num_available tokens that follow in the store's text.
struct StoreDraft {
  const int32_t* tokens;
  int64_t count;
  int64_t num_available;
  uint32_t match_len;
  uint8_t costs[kMaxDraftTokens];

  void write_outputs(int64_t i, const LookupOptions& options, int32_t padding_token, const DraftRows& token_output,
                     const DraftCosts& cost_output) const {
    const int64_t end = options.fill ? num_available : count;
    for (int64_t j = 0; j < options.k; ++j) token_output.set(i, j, j < end ? tokens[j] : padding_token);
    cost_output.set(i, costs, count, options.k);
  }
};

// Looks up rows in a store and drafts from the hits. The object converts to false if there is no valid store.
class StoreDrafter {
 public:
  explicit StoreDrafter(const StoreLookup& lookup)
      : lookup_(lookup), is_open_(open_store(lookup.store.words, lookup.store.num_words, &store_)) {}

  explicit operator bool() const { return is_open_; }

  // Finds the hits of a group of rows. The prefetches make the cache misses of the rows overlap.
  void look_up(StoreQuery* queries, int64_t size) const {
    for (int64_t i = 0; i < size; ++i) {
      StoreQuery& query = queries[i];
      query.hit = {nullptr, 0};
      if (query.row.tokens == nullptr) continue;
      query.keys =
          compute_ngram_keys(query.row.tokens + query.row.length, query.row.length, store::scope_seed(query.row.scope));
      for (uint32_t level = 0; level < query.keys.levels; ++level)
        __builtin_prefetch(store_.line(query.keys.values[level]));
    }
    for (int64_t i = 0; i < size; ++i) {
      if (queries[i].row.tokens == nullptr) continue;
      for (uint32_t level = 0; level < queries[i].keys.levels; ++level) prefetch_hit(store_, queries[i].keys, level);
    }
    for (int64_t i = 0; i < size; ++i) {
      StoreQuery& query = queries[i];
      if (query.row.tokens == nullptr) continue;
      store_.add_to_statistic(store::kStatLookups);
      for (uint32_t level = query.keys.levels; level-- > 0 && query.hit.entry == nullptr;)
        query.hit =
            find_hit(store_, query.keys, level, query.row.scope, query.row.tokens + query.row.length, query.row.length);
      if (query.hit.entry != nullptr) store_.add_to_statistic(store::kStatHits);
    }
  }

  // Computes the draft of a hit. Returns false if there is no hit, or if its draft does not have more expected accepted
  // tokens than the request's n-gram draft of `ngram_count` tokens.
  template <class Costs>
  bool draft(const StoreQuery& query, const LookupOptions& options, const Costs& ngram_costs, int64_t ngram_count,
             StoreDraft* draft) const {
    using namespace store;
    if (query.hit.entry == nullptr) return false;
    const uint32_t serial = query.hit.entry->position >> kBlockBits, offset = query.hit.entry->position % kBlockTokens;
    const int64_t num_available = int64_t{store_.fill(serial)} - offset;
    const int64_t max_count = smaller(draft_budget(options.k, options.max_len, query.row.length), num_available);
    const int32_t* const text = store_.text(serial) + offset;
    DraftCostReader cost_reader({lookup_.costs, lookup_.token_logits}, query.row.tokens[query.row.length - 1]);
    int64_t count = 0;
    for (int64_t total_cost = 0; count < max_count; ++count) {
      const int64_t cost_row = smaller<int64_t>(query.hit.match_len + count, kCostRows - 1);
      const int64_t column = count == 0 ? first_token_column(query.hit.entry->state)
                                        : store_.outcomes(serial)[offset + count] % kRowCostColumns;
      draft->costs[count] = cost_reader.next(cost_row * kStoreCostColumns + column, text[count]);
      total_cost += draft->costs[count];
      if (total_cost > lookup_.cost_limit) break;
    }
    if (expected_accepted_tokens(kAcceptanceProbabilities, draft->costs, count) <=
        expected_accepted_tokens(kAcceptanceProbabilities, ngram_costs, ngram_count))
      return false;
    draft->tokens = text;
    draft->count = count;
    draft->num_available = smaller(options.k, num_available);
    draft->match_len = query.hit.match_len;
    store_.add_to_statistic(kStatDrafts);
    store_.add_to_statistic(kStatTokens, static_cast<uint32_t>(count));
    return true;
  }

 private:
  static constexpr AcceptanceProbabilities kAcceptanceProbabilities{};

  const StoreLookup lookup_;
  Store store_{};
  const bool is_open_;
};

}  // namespace ngram_npu::cpu
