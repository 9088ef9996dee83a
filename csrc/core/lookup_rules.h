// The rules of the n-gram lookup that ngram_propose, ngram_step_ and the index share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// Rows of a table of costs by the length of the match; longer matches have the costs of the last row.
constexpr int64_t kCostRows = 16;
constexpr uint8_t kNoCost = 255;  // for unused places of a draft

// The arguments that all lookups share.
struct LookupOptions {
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t max_len;
  int32_t match_policy;
  bool overlap;
  bool fill;                      // unused places continue the draft: readable_drafts()
  Gm<const uint8_t> match_costs;  // [kCostRows], the costs of a scan's draft; null: it is not cut by cost
  int64_t cost_limit;
};

// Where a draft goes: [B, k] int32 or int64, rows `stride` items apart.
struct DraftRows {
  Gm<void> data;
  int64_t stride;
  int32_t bytes;  // 4 or 8

  NGRAM_FN void set(int64_t row, int64_t j, int32_t token) const {
    if (bytes == 8) {
      static_cast<Gm<int64_t>>(data)[row * stride + j] = token;
    } else {
      static_cast<Gm<int32_t>>(data)[row * stride + j] = token;
    }
  }
};

// The costs of a draft's tokens: [B, k], rows `stride` apart; `data` null: not requested.
struct DraftCosts {
  Gm<uint8_t> data;
  int64_t stride;

  // `costs` are those of the first `count` of k tokens.
  template <class Costs>
  NGRAM_FN void set(int64_t row, const Costs& costs, int64_t count, int64_t k) const {
    if (data == nullptr) return;
    for (int64_t j = 0; j < k; ++j) data[row * stride + j] = j < count ? costs[j] : kNoCost;
  }
};

// An end e: t[e-len+1..e] equals the last len tokens of the row; without a match, len is 0.
struct Occurrence {
  int64_t end;
  int64_t len;
};

// The number of tokens that a row may still draft before it reaches max_len. Compared first, because the difference
// alone could wrap.
NGRAM_FN int64_t draft_budget(int64_t k, int64_t max_len, int64_t num_tokens) {
  return max_len <= num_tokens ? 0 : smaller(k, max_len - num_tokens);
}

// A row and its number of tokens; row -1 with no tokens if there is nothing to look up.
struct LiveRow {
  int64_t row;
  int64_t length;
};

// A match needs two tokens and a length within the row's capacity.
NGRAM_FN bool can_look_up(int64_t num_tokens, int64_t capacity) { return num_tokens >= 2 && num_tokens <= capacity; }

// Rows that may not draft are not read.
NGRAM_FN bool may_draft(int64_t num_tokens, int64_t capacity, const LookupOptions& options) {
  return can_look_up(num_tokens, capacity) && draft_budget(options.k, options.max_len, num_tokens) > 0;
}

// The number of tokens to draft after an occurrence that ends at `end`.
NGRAM_FN int64_t draft_length(int64_t end, int64_t num_tokens, int64_t budget, bool overlap) {
  return overlap ? budget : smaller(budget, num_tokens - end - 1);
}

// The position from which draft token j is read. At the end of the row the draft continues into itself, with the period
// num_tokens - start. On a device uint32_t is enough for any row.
template <class Int>
NGRAM_FN Int draft_source(Int end, Int num_tokens, Int j) {
  const Int start = end + 1;
  return start + j < num_tokens ? start + j : start + j % (num_tokens - start);
}

// Words of workspace per request for a lookup on a device on which several blocks share a row.
constexpr int64_t kLookupWorkspaceWords = 4;
NGRAM_FN int64_t lookup_workspace_words(int64_t batch) { return kLookupWorkspaceWords * batch; }

// The costs of a draft's tokens, in sixteenths of a bit, if only the length of its match is known.
struct CostsByMatch {
  Gm<const uint8_t> costs;
  int64_t match_len;

  NGRAM_FN uint8_t operator[](int64_t j) const { return costs[smaller(match_len + j, kCostRows - 1)]; }
};

// The number of tokens to draft whatever they cost; `found.len` 0 means no occurrence.
NGRAM_FN int64_t most_drafts(Occurrence match, int64_t num_tokens, const LookupOptions& options) {
  if (match.len == 0) return 0;
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  return draft_length(match.end, num_tokens, budget, options.overlap);
}

// Whether a draft may end with the token up to which its costs add up to `total`.
NGRAM_FN bool is_within_limit(int64_t total, const LookupOptions& options) { return total <= options.cost_limit; }

// The number of tokens to draft.
NGRAM_FN int64_t num_drafts(Occurrence match, int64_t num_tokens, const LookupOptions& options) {
  const int64_t most = most_drafts(match, num_tokens, options);
  if (options.match_costs == nullptr) return most;
  const CostsByMatch costs{options.match_costs, match.len};
  int64_t count = 0;
  for (int64_t total = 0; count < most; ++count) {
    total += costs[count];
    if (!is_within_limit(total, options)) break;
  }
  return count;
}

// Number of output positions filled from the row. With `fill`, this includes the positions after the draft that the
// draft would reach if max_len and the cost limit did not apply.
NGRAM_FN int64_t readable_drafts(Occurrence match, int64_t num_tokens, int64_t drafts, const LookupOptions& options) {
  if (!options.fill || match.len == 0) return drafts;
  return draft_length(match.end, num_tokens, options.k, options.overlap);
}

// A match without a draft is not reported.
NGRAM_FN int32_t reported_len(Occurrence match, int64_t drafts) {
  return drafts > 0 ? static_cast<int32_t>(match.len) : 0;
}

}  // namespace ngram_npu
