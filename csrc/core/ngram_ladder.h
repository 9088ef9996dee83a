// The rules of the ladder: n-grams of 1, 2, 4, 8 and 16 tokens, and drafts as long as they are likely to be accepted.
// Definition: docs/ops/ngram_index_propose.md; why: docs/design/drafts.md.
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu {

constexpr int kLadderLevels = 5;
constexpr int64_t kLadderMaxN = 16;
// A table of costs: [longest match counted + 1][outcomes].
constexpr int64_t kCostRows = 16;
constexpr int64_t kCostColumns = 32;
constexpr uint8_t kNoCost = 255;  // for unused places of a draft

NGRAM_FN uint32_t ladder_size(uint32_t level) { return 1u << level; }

// The ladder arguments of a call.
struct LadderOptions {
  bool on;
  const uint8_t* costs;  // [kCostRows, kCostColumns]; null: drafts of k tokens, and no outcomes are kept
  int64_t cost_limit;
  uint8_t* draft_costs;  // [B, k], rows `draft_costs_stride` apart; null: not requested
  int64_t draft_costs_stride;
};

// The outcome of the candidate for the token at `place`: the length of its match, and whether it was right. A candidate
// is an occurrence whose `len` counts up to 16 tokens that agree; `len` 0: there was none.
NGRAM_FN uint8_t outcome_of(Occurrence candidate, const int32_t* tokens, int64_t place) {
  if (candidate.len == 0) return 0;
  const bool right = tokens[candidate.end + 1] == tokens[place];
  return static_cast<uint8_t>(smaller<int64_t>(candidate.len, kCostRows - 1) * 2 + right);
}

// Writes one row's outputs, as write_draft. `outcome(place)` is the outcome byte of the token at `place`.
template <class Outcome>
NGRAM_FN void write_ladder_draft(const int32_t* tokens, int64_t num_tokens, Occurrence found,
                                 const LookupOptions& options, const LadderOptions& ladder, Outcome&& outcome,
                                 int32_t unused, int32_t* draft, int32_t* num_draft, int32_t* match_len,
                                 uint8_t* draft_costs) {
  const int64_t most = num_drafts(found, num_tokens, options);
  int64_t count = 0;
  for (int64_t total = 0; count < most; ++count) {
    const int64_t place = draft_source(found.end, num_tokens, count);
    if (ladder.costs != nullptr) {
      const int64_t row = smaller<int64_t>(found.len + count, kCostRows - 1);
      const uint8_t cost = ladder.costs[row * kCostColumns + outcome(place) % kCostColumns];
      total += cost;
      if (total > ladder.cost_limit) break;
      if (draft_costs != nullptr) draft_costs[count] = cost;
    }
    draft[count] = tokens[place];
  }
  for (int64_t j = count; j < options.k; ++j) {
    draft[j] = unused;
    if (draft_costs != nullptr) draft_costs[j] = kNoCost;
  }
  *num_draft = static_cast<int32_t>(count);
  *match_len = reported_len(found, count);
}

}  // namespace ngram_npu
