// The operators' definitions as simple code, to check the kernels. It uses the types of csrc, not its rules.
#pragma once

#include <cstdint>
#include <vector>

#include "core/lookup_rules.h"

namespace ngram_npu::test {

using Tokens = std::vector<int32_t>;

inline int64_t length_of(const Tokens& tokens) { return static_cast<int64_t>(tokens.size()); }

// Returns the length of the longest common suffix of t[0..e] and of the whole row, at most max_n.
inline int64_t common_suffix(const Tokens& t, int64_t e, int64_t max_n) {
  const int64_t last = length_of(t) - 1;
  int64_t len = 0;
  while (len < max_n && e - len >= 0 && t[static_cast<size_t>(e - len)] == t[static_cast<size_t>(last - len)]) ++len;
  return len;
}

inline Match expected_match(const Tokens& t, int64_t min_n, int64_t max_n, int32_t match_policy) {
  Match best{-1, 0};
  for (int64_t e = 0; e <= length_of(t) - 2; ++e) {
    const int64_t len = common_suffix(t, e, max_n);
    if (len < min_n) continue;
    if (len > best.len || (len == best.len && match_policy == kLatest)) best = {e, len};
  }
  return best;
}

struct Draft {
  Tokens tokens;  // k tokens; unused positions have -1
  int32_t count = 0;
  int32_t match_len = 0;

  bool operator==(const Draft& other) const {
    return tokens == other.tokens && count == other.count && match_len == other.match_len;
  }
};

inline Draft no_draft(int64_t k) { return {Tokens(static_cast<size_t>(k), -1), 0, 0}; }

// Returns the tokens after an occurrence, up to the first token j for which `takes(j, place)` is false. `place` is the
// position of the token in the row.
template <class Takes>
Draft draft_after(const Tokens& t, const Match& match, const LookupOptions& o, const Takes& takes) {
  Draft draft = no_draft(o.k);
  if (match.len == 0) return draft;
  Tokens extended = t;  // with overlap, the draft is read as if it had been appended
  for (int64_t j = 0; j < o.k; ++j) {
    const int64_t position = match.end + 1 + j;
    if (length_of(t) + j >= o.max_len) break;
    if (position >= length_of(t) && !o.overlap) break;
    int64_t place = position;
    while (place >= length_of(t)) place -= length_of(t) - (match.end + 1);
    if (!takes(j, place)) break;
    extended.push_back(extended[static_cast<size_t>(position)]);
    draft.tokens[static_cast<size_t>(j)] = extended.back();
    ++draft.count;
  }
  if (draft.count > 0) draft.match_len = static_cast<int32_t>(match.len);
  return draft;
}

// Returns the draft of a row with these tokens.
inline Draft expected_draft(const Tokens& t, const LookupOptions& o) {
  const Match match = expected_match(t, o.min_n, o.max_n, o.match_policy);
  return draft_after(t, match, o, [](int64_t, int64_t) { return true; });
}

// Returns the candidate of a ladder: the latest occurrence with the longest match of 1, 2, 4, 8 or 16 tokens.
inline Match expected_candidate(const Tokens& t) {
  Match best{-1, 0};
  int64_t best_size = 1;
  for (int64_t e = 0; e <= length_of(t) - 2; ++e) {
    const int64_t len = common_suffix(t, e, 16);
    int64_t size = 16;
    while (size > len) size /= 2;
    if (size < best_size) continue;
    best = {e, len};
    best_size = size;
  }
  return best;
}

// Returns the outcome byte of the token at `place`.
inline int64_t expected_outcome(const Tokens& t, int64_t place) {
  const Match match = expected_candidate({t.begin(), t.begin() + place});
  if (match.len == 0) return 0;
  const bool is_correct = t[static_cast<size_t>(match.end + 1)] == t[static_cast<size_t>(place)];
  return (match.len > 15 ? 15 : match.len) * 2 + is_correct;
}

// Returns the draft of a row with a ladder. costs: [16][32], or null. knows_outcomes: if false, all outcomes count as
// 0. paid: receives the cost of each token.
inline Draft expected_ladder_draft(const Tokens& t, const LookupOptions& o, const uint8_t* costs, int64_t cost_limit,
                                   bool knows_outcomes, std::vector<uint8_t>* paid) {
  const Match match = expected_candidate(t);
  int64_t total = 0;
  return draft_after(t, match, o, [&](int64_t j, int64_t place) {
    if (costs == nullptr) return true;
    const int64_t row = match.len + j > 15 ? 15 : match.len + j;
    paid->push_back(costs[row * 32 + (knows_outcomes ? expected_outcome(t, place) : 0)]);
    total += paid->back();
    if (total > cost_limit) paid->pop_back();
    return total <= cost_limit;
  });
}

}  // namespace ngram_npu::test
