// The rules of the ladder: n-grams of 1, 2, 4, 8 and 16 tokens, and drafts as long as they are likely to be accepted.
// Definition: docs/ops/ngram_index_propose.md; why: docs/design/drafts.md.
#pragma once

#include "core/draft_costs.h"
#include "core/lookup_rules.h"

namespace ngram_npu {

constexpr int kLadderLevels = 5;
constexpr int64_t kLadderMaxN = 16;
constexpr int64_t kCostColumns = 32;  // of a table of costs: the outcomes

NGRAM_FN uint32_t ladder_size(uint32_t level) { return 1u << level; }

// The ladder arguments of a call.
struct LadderOptions {
  bool on;
  const void* costs;  // CostTable of [kCostRows, kCostColumns]; null: drafts of k tokens, and no outcomes are kept
  int64_t cost_limit;
  const int8_t* token_logits = nullptr;
};

// The outcome of the candidate for the token at `place`: the length of its match, and whether it was right. A candidate
// is an occurrence whose `len` counts up to 16 tokens that agree; `len` 0: there was none.
NGRAM_FN uint8_t outcome_of(Occurrence candidate, const int32_t* tokens, int64_t place) {
  if (candidate.len == 0) return 0;
  const bool right = tokens[candidate.end + 1] == tokens[place];
  return static_cast<uint8_t>(smaller<int64_t>(candidate.len, kCostRows - 1) * 2 + right);
}

}  // namespace ngram_npu
