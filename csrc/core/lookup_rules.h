// The rules of the n-gram lookup that ngram_propose, ngram_step_ and the index share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// The scalar arguments that all lookups share.
struct LookupOptions {
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t max_len;
  int32_t match_policy;
  bool overlap;
};

// An end e whose suffix t[e-len+1..e] equals the last len tokens of the row; len is 0 if there is none.
struct Occurrence {
  int64_t end;
  int64_t len;
};

// The tokens a row may still draft before it reaches max_len (compared first: the difference alone could wrap).
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

// The number of tokens to draft; `found.len` 0 means no occurrence.
NGRAM_FN int64_t num_drafts(Occurrence found, int64_t num_tokens, const LookupOptions& options) {
  if (found.len == 0) return 0;
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  return draft_length(found.end, num_tokens, budget, options.overlap);
}

// A match without a draft is not reported.
NGRAM_FN int32_t reported_len(Occurrence found, int64_t drafts) {
  return drafts > 0 ? static_cast<int32_t>(found.len) : 0;
}

// Writes one row's outputs; `draft` has k places, of which unused ones get `unused`.
NGRAM_FN void write_draft(const int32_t* tokens, int64_t num_tokens, Occurrence found, const LookupOptions& options,
                          int32_t unused, int32_t* draft, int32_t* num_draft, int32_t* match_len) {
  const int64_t count = num_drafts(found, num_tokens, options);
  for (int64_t j = 0; j < count; ++j) draft[j] = tokens[draft_source(found.end, num_tokens, j)];
  for (int64_t j = count; j < options.k; ++j) draft[j] = unused;
  *num_draft = static_cast<int32_t>(count);
  *match_len = reported_len(found, count);
}

}  // namespace ngram_npu
