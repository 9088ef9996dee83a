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
  int32_t match;
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

// A row can hold a match only with two tokens, and only if its length lies within the row.
NGRAM_FN bool can_look_up(int64_t num_tokens, int64_t capacity) { return num_tokens >= 2 && num_tokens <= capacity; }

// How many drafts follow an occurrence that ends at `end`.
NGRAM_FN int64_t draft_length(int64_t end, int64_t num_tokens, int64_t budget, bool overlap) {
  return overlap ? budget : smaller(budget, num_tokens - end - 1);
}

// Where draft j is read. Past the end of the row the draft continues into itself, which has the period num_tokens -
// start.
NGRAM_FN int64_t draft_source(int64_t end, int64_t num_tokens, int64_t j) {
  const int64_t start = end + 1;
  return start + j < num_tokens ? start + j : start + j % (num_tokens - start);
}

// How many drafts a row gets. `found.len` 0 means no occurrence.
NGRAM_FN int64_t draft_count(const Occurrence& found, int64_t num_tokens, const LookupOptions& options) {
  if (found.len == 0) return 0;
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  return draft_length(found.end, num_tokens, budget, options.overlap);
}

// The match_len that goes with so many drafts.
NGRAM_FN int32_t match_len_of(const Occurrence& found, int64_t count) {
  return count > 0 ? static_cast<int32_t>(found.len) : 0;
}

// One row's outputs; draft has k slots.
NGRAM_FN void write_draft(const int32_t* tokens, int64_t num_tokens, Occurrence found, const LookupOptions& options,
                          int32_t* draft, int32_t* num_draft, int32_t* match_len) {
  const int64_t count = draft_count(found, num_tokens, options);
  for (int64_t j = 0; j < count; ++j) draft[j] = tokens[draft_source(found.end, num_tokens, j)];
  for (int64_t j = count; j < options.k; ++j) draft[j] = kNoToken;
  *num_draft = static_cast<int32_t>(count);
  *match_len = match_len_of(found, count);
}

}  // namespace ngram_npu
