// The operators' definitions written out as plainly as possible, to check the kernels against. Nothing of csrc's rules
// is used here, only its types.
#pragma once

#include <cstdint>
#include <vector>

#include "core/lookup_rules.h"

namespace ngram_npu::test {

using Tokens = std::vector<int32_t>;

inline int64_t length_of(const Tokens& tokens) { return static_cast<int64_t>(tokens.size()); }

// L(e): the longest common suffix of t[0..e] and of the whole row, at most max_n.
inline int64_t common_suffix(const Tokens& t, int64_t e, int64_t max_n) {
  const int64_t last = length_of(t) - 1;
  int64_t len = 0;
  while (len < max_n && e - len >= 0 && t[static_cast<size_t>(e - len)] == t[static_cast<size_t>(last - len)]) ++len;
  return len;
}

inline Occurrence expected_occurrence(const Tokens& t, int64_t min_n, int64_t max_n, int32_t match_policy) {
  Occurrence best{-1, 0};
  for (int64_t e = 0; e <= length_of(t) - 2; ++e) {
    const int64_t len = common_suffix(t, e, max_n);
    if (len < min_n) continue;
    if (len > best.len || (len == best.len && match_policy == kLatest)) best = {e, len};
  }
  return best;
}

struct Draft {
  Tokens tokens;  // k of them, unused ones -1
  int32_t count = 0;
  int32_t match_len = 0;

  bool operator==(const Draft& other) const {
    return tokens == other.tokens && count == other.count && match_len == other.match_len;
  }
};

inline Draft no_draft(int64_t k) { return {Tokens(static_cast<size_t>(k), -1), 0, 0}; }

// The draft of a row with these tokens, all of them within its capacity.
inline Draft expected_draft(const Tokens& t, const LookupOptions& o) {
  Draft draft = no_draft(o.k);
  const Occurrence found = expected_occurrence(t, o.min_n, o.max_n, o.match_policy);
  if (found.len == 0) return draft;
  Tokens grown = t;  // with overlap, the draft is read as if it had been appended
  for (int64_t j = 0; j < o.k; ++j) {
    const int64_t position = found.end + 1 + j;
    if (length_of(t) + j >= o.max_len) break;
    if (position >= length_of(t) && !o.overlap) break;
    grown.push_back(grown[static_cast<size_t>(position)]);
    draft.tokens[static_cast<size_t>(j)] = grown.back();
    ++draft.count;
  }
  if (draft.count > 0) draft.match_len = static_cast<int32_t>(found.len);
  return draft;
}

}  // namespace ngram_npu::test
