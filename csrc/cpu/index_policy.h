// Decides when an index is used instead of a scan of the rows, and how fast an index catches up with its rows.
// Measurements: docs/design/index.md, "When it pays".
#pragma once

#include <vector>

#include "core/common.h"

namespace ngram_npu::cpu {

// The most that one call of ngram_index_propose_ or ngram_index_step_ indexes besides the newest tokens: about 1 ms.
constexpr int64_t kOperatorCatchUpTokens = 32768;
// The most that one job of StreamDrafter indexes, mostly of prompts: 0.2 to 0.6 ms.
constexpr int64_t kStreamCatchUpTokens = 8192;

// Indexing a token takes as long as scanning this many tokens, on machines that scan fast.
constexpr int64_t kScannedPerIndexed = 768;
// Looking up a row in the index takes as long as scanning this many tokens.
constexpr int64_t kScannedPerLookup = 2048;
// The lookup itself indexes up to this many missing tokens of a row that drafts.
constexpr int64_t kLeftToLookup = 64;

// The fields are defaults, which tests replace.
struct IndexPolicy {
  // Up to this row capacity engine="auto" scans, because an index is not faster.
  int64_t short_row = 2048;
  // The same for vLLM's max_model_len, where finding a row's slot takes time as well.
  int64_t short_context = 8192;
  // A step scans if its rows have at most this many tokens together, or 1/128 of it per row.
  int64_t scanned_tokens = 3 << 17;
  // A step in which no row drafts indexes up to this many tokens. Prefill takes much longer than this millisecond.
  int64_t prompt_tokens = 32768;
  // Any other step indexes at least this many tokens: takes less than a microsecond.
  int64_t least_tokens = 16;
  // While no row is completely indexed, one of this many steps indexes for all of them: most of the additional time is
  // for the call, not for the tokens.
  int64_t steps_to_catch_up = 4;
  // While memory is half used, a request without a row keeps its slot for this many steps. It may still run: in
  // another micro-batch, or the token budget was too small for it.
  int64_t patience = 64;

  // The number of steps for which step `step` indexes. 0: the step scans its rows instead. `num_behind` rows cannot be
  // looked up yet.
  int64_t steps_to_index(int64_t step, int64_t num_tokens, int64_t num_rows, int64_t num_behind, bool drafts) const {
    if (num_tokens <= larger(scanned_tokens, scanned_tokens / 128 * num_rows)) return 0;
    if (num_behind < num_rows || !drafts) return 1;
    return step % steps_to_catch_up == 0 ? steps_to_catch_up : 0;
  }

  // The number of steps after which absent requests lose their slots. Negative: all of them keep their slots, as they
  // do while half of the memory is free. `ends_requests`: a store needs to learn which requests have ended.
  int64_t steps_to_keep_absent(int64_t step, double share_in_use, bool ends_requests) const {
    if (share_in_use > 0.9) return 0;
    return share_in_use > 0.5 || (ends_requests && step % patience == 0) ? patience : -1;
  }
};

// Rows to index before a lookup, and how far.
struct CatchUpPlan {
  std::vector<int64_t> rows;
  std::vector<int32_t> slots;       // of these rows
  std::vector<int32_t> num_tokens;  // of every row of the batch: the length to index; 0 if not in `rows`
  std::vector<int32_t>
      lookup_slots;        // of every row of the batch; -1: too many tokens are not indexed yet: the row is scanned
  int64_t num_behind = 0;  // rows of the latter kind
};

// Plans a step's catching up. It takes 1/32 of the time of a scan of the rows, so that a step takes little longer than
// a scan, plus the time that rows without a scan save; `steps` times that.
//
// indexed: tokens of each row that its slot has.
// num_sampled: newest tokens of each row; rows without any do not draft, and are to be indexed completely.
inline CatchUpPlan plan_catch_up(const IndexPolicy& policy, const int32_t* num_tokens, const int32_t* num_sampled,
                                 const int32_t* slots, const std::vector<int64_t>& indexed, int64_t steps) {
  const auto batch = static_cast<int64_t>(indexed.size());
  const auto missing = [&](int64_t i) {
    return int64_t{num_tokens[i]} - larger(num_sampled[i], 0) - indexed[static_cast<size_t>(i)];
  };
  int64_t scanned = 0, saved = 0;
  bool drafts = false;
  for (int64_t i = 0; i < batch; ++i) {
    if (num_sampled[i] < 1) continue;
    drafts = true;
    scanned += num_tokens[i];
    if (missing(i) <= kLeftToLookup) saved += larger(num_tokens[i] - kScannedPerLookup, int64_t{0});
  }
  int64_t budget = policy.prompt_tokens;
  if (drafts) budget = larger(policy.least_tokens, (scanned / 32 + saved) / kScannedPerIndexed) * steps;

  CatchUpPlan plan;
  plan.num_tokens.resize(indexed.size());
  plan.lookup_slots.resize(indexed.size());
  for (int64_t i = 0; i < batch; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t left = missing(i), bearable = num_sampled[i] < 1 ? 0 : kLeftToLookup;
    const int64_t taken = left > bearable ? smaller(left, budget) : 0;
    budget -= taken;
    if (taken > 0) {
      plan.rows.push_back(i);
      plan.slots.push_back(slots[i]);
      plan.num_tokens[at] = static_cast<int32_t>(indexed[at] + taken);
    }
    const bool is_behind = left - taken > bearable;
    plan.lookup_slots[at] = is_behind ? -1 : slots[i];
    plan.num_behind += is_behind ? 1 : 0;
  }
  return plan;
}

}  // namespace ngram_npu::cpu
