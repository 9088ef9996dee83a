// The rules of the n-gram lookup that ngram_propose, ngram_step_ and the index share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// How to look and what to draft: the scalar arguments all lookups have in common.
struct LookupOptions {
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t max_len;
  int32_t match_policy;
  bool overlap;
};

// An end e whose suffix t[e-len+1..e] equals the last len tokens of the row; len 0 where there is none.
struct Occurrence {
  int64_t end;
  int64_t len;
};

// The tokens a row may still draft before it reaches max_len (compared first: the difference alone could wrap).
NGRAM_FN int64_t draft_budget(int64_t k, int64_t max_len, int64_t num_tokens) {
  return max_len <= num_tokens ? 0 : smaller(k, max_len - num_tokens);
}

// What an operator looks up in: a row and how many tokens it holds; row -1 and no tokens where there is nothing to do.
struct LiveRow {
  int64_t row;
  int64_t length;
};

// A row can hold a match only with two tokens, and only if its length lies within the row.
NGRAM_FN bool can_look_up(int64_t num_tokens, int64_t capacity) { return num_tokens >= 2 && num_tokens <= capacity; }

// A row that may not draft is not read.
NGRAM_FN bool may_draft(int64_t num_tokens, int64_t capacity, const LookupOptions& options) {
  return can_look_up(num_tokens, capacity) && draft_budget(options.k, options.max_len, num_tokens) > 0;
}

// How many drafts follow an occurrence that ends at `end`.
NGRAM_FN int64_t draft_length(int64_t end, int64_t num_tokens, int64_t budget, bool overlap) {
  return overlap ? budget : smaller(budget, num_tokens - end - 1);
}

// Where draft j is read. Past the end of the row the draft continues into itself, which has the period num_tokens -
// start. On a device uint32_t is enough for any row.
template <class Int>
NGRAM_FN Int draft_source(Int end, Int num_tokens, Int j) {
  const Int start = end + 1;
  return start + j < num_tokens ? start + j : start + j % (num_tokens - start);
}

// Words of workspace that a lookup needs on a device where several blocks share a row: those of the batch together.
constexpr int64_t kLookupWorkspaceWords = 4;  // a request's
NGRAM_FN int64_t lookup_workspace_words(int64_t batch) { return kLookupWorkspaceWords * batch; }

// How many tokens are drafted; `found.len` 0 means no occurrence.
NGRAM_FN int64_t num_drafts(Occurrence found, int64_t num_tokens, const LookupOptions& options) {
  if (found.len == 0) return 0;
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  return draft_length(found.end, num_tokens, budget, options.overlap);
}

// A match that gave no draft is not reported.
NGRAM_FN int32_t reported_len(Occurrence found, int64_t drafts) {
  return drafts > 0 ? static_cast<int32_t>(found.len) : 0;
}

// One row's outputs; draft has k slots, of which those without a draft get `unused`.
NGRAM_FN void write_draft(const int32_t* tokens, int64_t num_tokens, Occurrence found, const LookupOptions& options,
                          int32_t unused, int32_t* draft, int32_t* num_draft, int32_t* match_len) {
  const int64_t count = num_drafts(found, num_tokens, options);
  for (int64_t j = 0; j < count; ++j) draft[j] = tokens[draft_source(found.end, num_tokens, j)];
  for (int64_t j = count; j < options.k; ++j) draft[j] = unused;
  *num_draft = static_cast<int32_t>(count);
  *match_len = reported_len(found, count);
}

}  // namespace ngram_npu
