// Decides whether a step uses the index or scans the rows, and how many tokens are indexed per step. Measurements:
// docs/design/index.md, "When it saves time".
#pragma once

#include <vector>

#include "core/common.h"

namespace ngram_npu::cpu {

// Maximum number of tokens that one call of ngram_index_propose_ or ngram_index_step_ indexes in addition to the newest
// tokens. Indexing these tokens takes about 1 ms.
constexpr int64_t kMaxOperatorCatchUpTokens = 32768;
// Maximum number of tokens, mostly prompt tokens, that one job of StreamDrafter indexes in addition to the newest
// tokens. Indexing these tokens takes 0.2 to 0.6 ms.
constexpr int64_t kMaxStreamCatchUpTokens = 8192;

// Indexing one token takes as long as scanning this number of tokens, on machines with a fast scan.
constexpr int64_t kIndexCostInScannedTokens = 768;
// Looking up a row in the index takes as long as scanning this number of tokens.
constexpr int64_t kLookupCostInScannedTokens = 2048;
// For a row with new tokens, the lookup itself indexes up to this number of missing tokens.
constexpr int64_t kMaxTokensIndexedByLookup = 64;

// The fields have default values, which tests replace.
struct IndexPolicy {
  // Up to this row capacity, engine="auto" scans, because an index is not faster for such rows.
  int64_t max_scan_row_capacity = 2048;
  // The limit for vLLM's max_model_len, which is higher, because in vLLM finding each row's slot takes time as well.
  int64_t max_scan_context = 8192;
  // A step scans if its rows have at most this number of tokens in total, or on average at most 1/128 of this number.
  int64_t max_scan_tokens = 3 << 17;
  // A step in which no row has new tokens indexes up to this number of tokens. Indexing these tokens takes about 1 ms,
  // which is short compared with prefill.
  int64_t prefill_index_budget = 32768;
  // Any other step may index at least this number of tokens, which takes less than a microsecond.
  int64_t min_index_budget = 16;
  // While no row can be looked up yet, only every n-th step indexes, with the budget of n steps, because most of the
  // additional time is spent on the call, not on the tokens.
  int64_t steps_to_catch_up = 4;
  // While more than half of the memory is used, a request without a row keeps its slot for this number of steps. The
  // request may still be alive, for example in another micro-batch, or because the token budget was too small.
  int64_t max_absent_steps = 64;

  // The indexing budget of step `step`, as a multiple of the budget of one step; 0: the step scans its rows instead.
  // num_behind: number of rows that cannot be looked up yet. has_new_tokens: whether the rows have new tokens.
  int64_t compute_budget_factor(int64_t step, int64_t num_tokens, int64_t num_rows, int64_t num_behind,
                                bool has_new_tokens) const {
    if (num_tokens <= larger(max_scan_tokens, max_scan_tokens / 128 * num_rows)) return 0;
    if (num_behind < num_rows || !has_new_tokens) return 1;
    return step % steps_to_catch_up == 0 ? steps_to_catch_up : 0;
  }

  // The number of steps after which absent requests lose their slots. Negative: all requests keep their slots, which is
  // the case while half of the memory is free. ends_requests: whether a store must know when requests have ended.
  int64_t compute_steps_to_keep_absent(int64_t step, double share_in_use, bool ends_requests) const {
    if (share_in_use > 0.9) return 0;
    return share_in_use > 0.5 || (ends_requests && step % max_absent_steps == 0) ? max_absent_steps : -1;
  }
};

// The rows to index before a lookup, and the length up to which to index each row.
struct CatchUpPlan {
  std::vector<int64_t> rows;
  std::vector<int32_t> slots;         // slots of the rows in `rows`
  std::vector<int32_t> num_tokens;    // per row of the batch: the length to index; 0 if the row is not in `rows`
  std::vector<int32_t> lookup_slots;  // per row of the batch; -1: scan the row, because too many tokens are not indexed
  int64_t num_behind = 0;             // number of rows with lookup slot -1
};

// Distributes the indexing budget of a step. The budget is `steps` times the sum of 1/32 of the scan time of the rows
// and the time saved by rows that need no scan, so a step takes little longer than a scan.
//
// indexed_lengths: number of indexed tokens of each row.
// num_sampled: number of new tokens of each row. Rows without new tokens get no drafts and are indexed completely.
inline CatchUpPlan plan_catch_up(const IndexPolicy& policy, const int32_t* num_tokens, const int32_t* num_sampled,
                                 const int32_t* slots, const std::vector<int64_t>& indexed_lengths, int64_t steps) {
  const auto batch = static_cast<int64_t>(indexed_lengths.size());
  const auto count_missing = [&](int64_t i) {
    return int64_t{num_tokens[i]} - larger(num_sampled[i], 0) - indexed_lengths[static_cast<size_t>(i)];
  };
  int64_t num_scanned = 0, num_saved = 0;
  bool has_new_tokens = false;
  for (int64_t i = 0; i < batch; ++i) {
    if (num_sampled[i] < 1) continue;
    has_new_tokens = true;
    num_scanned += num_tokens[i];
    if (count_missing(i) <= kMaxTokensIndexedByLookup)
      num_saved += larger(num_tokens[i] - kLookupCostInScannedTokens, int64_t{0});
  }
  int64_t budget = policy.prefill_index_budget;
  if (has_new_tokens)
    budget = larger(policy.min_index_budget, (num_scanned / 32 + num_saved) / kIndexCostInScannedTokens) * steps;

  CatchUpPlan plan;
  plan.num_tokens.resize(indexed_lengths.size());
  plan.lookup_slots.resize(indexed_lengths.size());
  for (int64_t i = 0; i < batch; ++i) {
    const auto row = static_cast<size_t>(i);
    const int64_t num_missing = count_missing(i), max_missing = num_sampled[i] < 1 ? 0 : kMaxTokensIndexedByLookup;
    const int64_t num_to_index = num_missing > max_missing ? smaller(num_missing, budget) : 0;
    budget -= num_to_index;
    if (num_to_index > 0) {
      plan.rows.push_back(i);
      plan.slots.push_back(slots[i]);
      plan.num_tokens[row] = static_cast<int32_t>(indexed_lengths[row] + num_to_index);
    }
    const bool is_behind = num_missing - num_to_index > max_missing;
    plan.lookup_slots[row] = is_behind ? -1 : slots[i];
    plan.num_behind += is_behind ? 1 : 0;
  }
  return plan;
}

}  // namespace ngram_npu::cpu
