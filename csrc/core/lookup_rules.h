// Functions of the n-gram lookup that ngram_propose, ngram_step_ and the index share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// Number of rows of a cost table. The match length selects the row; longer matches use the last row.
constexpr int64_t kCostRows = 16;
constexpr uint8_t kNoCost = 255;  // value of output positions without a draft token

// The arguments that all lookups share.
struct LookupOptions {
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t max_len;
  int32_t match_policy;
  bool overlap;
  bool fill;                      // fill the positions after the draft: count_filled_positions()
  Gm<const uint8_t> match_costs;  // [kCostRows]: costs that truncate the drafts of a scan; null: no truncation
  int64_t cost_limit;
};

// Output tensor of the drafts: [B, k] int32 or int64; rows are `stride` items apart.
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

// Output tensor of the drafts' costs: [B, k]; rows are `stride` items apart. `data` is null if no costs are requested.
struct DraftCosts {
  Gm<uint8_t> data;
  int64_t stride;

  // Writes the costs of the first `count` of k tokens; the other positions get kNoCost.
  template <class Costs>
  NGRAM_FN void set(int64_t row, const Costs& costs, int64_t count, int64_t k) const {
    if (data == nullptr) return;
    for (int64_t j = 0; j < k; ++j) data[row * stride + j] = j < count ? costs[j] : kNoCost;
  }
};

// A match: the `len` tokens that end at position `end` equal the last `len` tokens of the row. len 0: no match.
struct Match {
  int64_t end;
  int64_t len;
};

// The number of tokens that may be drafted for a row before the row reaches max_len. The lengths are compared first,
// because their difference could overflow.
NGRAM_FN int64_t draft_budget(int64_t k, int64_t max_len, int64_t num_tokens) {
  return max_len <= num_tokens ? 0 : smaller(k, max_len - num_tokens);
}

// The row of a request and the row's number of tokens; {-1, 0} if the request has no usable row.
struct RequestRow {
  int64_t row;
  int64_t length;
};

// A lookup needs at least two tokens, and num_tokens must not exceed the row's capacity.
NGRAM_FN bool is_lookup_possible(int64_t num_tokens, int64_t capacity) {
  return num_tokens >= 2 && num_tokens <= capacity;
}

// Whether tokens may be drafted for the row. If not, the row is not read.
NGRAM_FN bool may_draft(int64_t num_tokens, int64_t capacity, const LookupOptions& options) {
  return is_lookup_possible(num_tokens, capacity) && draft_budget(options.k, options.max_len, num_tokens) > 0;
}

// The number of tokens to draft after a match that ends at `end`.
NGRAM_FN int64_t draft_length(int64_t end, int64_t num_tokens, int64_t budget, bool overlap) {
  return overlap ? budget : smaller(budget, num_tokens - end - 1);
}

// The position from which draft token j is read. After the end of the row, the draft repeats with the period
// num_tokens - start. Device kernels use uint32_t as Int, which is enough for any row.
template <class Int>
NGRAM_FN Int draft_read_position(Int end, Int num_tokens, Int j) {
  const Int start = end + 1;
  return start + j < num_tokens ? start + j : start + j % (num_tokens - start);
}

// Words of workspace per request for a lookup on a device, where several thread blocks may search the same row.
constexpr int64_t kLookupWorkspaceWords = 4;
NGRAM_FN int64_t lookup_workspace_words(int64_t batch) { return kLookupWorkspaceWords * batch; }

// The costs of a draft's tokens, in 1/16 bit, computed from the match length alone.
struct CostsByMatch {
  Gm<const uint8_t> costs;
  int64_t match_len;

  NGRAM_FN uint8_t operator[](int64_t j) const { return costs[smaller(match_len + j, kCostRows - 1)]; }
};

// The number of tokens to draft without a cost limit.
NGRAM_FN int64_t max_draft_tokens(Match match, int64_t num_tokens, const LookupOptions& options) {
  if (match.len == 0) return 0;
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  return draft_length(match.end, num_tokens, budget, options.overlap);
}

NGRAM_FN bool is_within_cost_limit(int64_t total_cost, const LookupOptions& options) {
  return total_cost <= options.cost_limit;
}

// The number of tokens to draft.
NGRAM_FN int64_t count_draft_tokens(Match match, int64_t num_tokens, const LookupOptions& options) {
  const int64_t max_count = max_draft_tokens(match, num_tokens, options);
  if (options.match_costs == nullptr) return max_count;
  const CostsByMatch costs{options.match_costs, match.len};
  int64_t count = 0;
  for (int64_t total_cost = 0; count < max_count; ++count) {
    total_cost += costs[count];
    if (!is_within_cost_limit(total_cost, options)) break;
  }
  return count;
}

// Number of output positions filled from the row. With `fill`, this includes the positions after the draft that the
// draft would reach if max_len and the cost limit did not apply.
NGRAM_FN int64_t count_filled_positions(Match match, int64_t num_tokens, int64_t num_draft_tokens,
                                        const LookupOptions& options) {
  if (!options.fill || match.len == 0) return num_draft_tokens;
  return draft_length(match.end, num_tokens, options.k, options.overlap);
}

// The match length to report: 0 if nothing is drafted.
NGRAM_FN int32_t reported_match_len(Match match, int64_t num_draft_tokens) {
  return num_draft_tokens > 0 ? static_cast<int32_t>(match.len) : 0;
}

}  // namespace ngram_npu
