// Simple implementations of the operators' definitions, with which the tests compare the kernels. They use only types
// of csrc, none of its functions.
#pragma once

#include <cstdint>
#include <vector>

#include "core/lookup_rules.h"

namespace ngram_npu::test {

using Tokens = std::vector<int32_t>;

inline int64_t length_of(const Tokens& tokens) { return static_cast<int64_t>(tokens.size()); }

// Returns the length of the longest common suffix of tokens[0..end] and of the whole row, at most max_n.
inline int64_t common_suffix_length(const Tokens& tokens, int64_t end, int64_t max_n) {
  const int64_t last = length_of(tokens) - 1;
  int64_t length = 0;
  while (length < max_n && end - length >= 0 &&
         tokens[static_cast<size_t>(end - length)] == tokens[static_cast<size_t>(last - length)])
    ++length;
  return length;
}

inline Match find_expected_match(const Tokens& tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  Match best{-1, 0};
  for (int64_t end = 0; end <= length_of(tokens) - 2; ++end) {
    const int64_t length = common_suffix_length(tokens, end, max_n);
    if (length < min_n) continue;
    if (length > best.len || (length == best.len && match_policy == kLatest)) best = {end, length};
  }
  return best;
}

struct Draft {
  Tokens tokens;  // k tokens; -1 after the draft's end
  int32_t count = 0;
  int32_t match_len = 0;

  bool operator==(const Draft& other) const {
    return tokens == other.tokens && count == other.count && match_len == other.match_len;
  }
};

inline Draft make_empty_draft(int64_t k) { return {Tokens(static_cast<size_t>(k), -1), 0, 0}; }

// Returns the tokens after an occurrence, up to the first token j for which `accepts(j, row_position)` is false.
// row_position: position of the token in the row.
template <class Accepts>
Draft copy_draft_after(const Tokens& tokens, const Match& match, const LookupOptions& options, const Accepts& accepts) {
  Draft draft = make_empty_draft(options.k);
  if (match.len == 0) return draft;
  Tokens extended = tokens;  // with overlap, the draft may continue with its own first tokens
  for (int64_t j = 0; j < options.k; ++j) {
    const int64_t extended_position = match.end + 1 + j;
    if (length_of(tokens) + j >= options.max_len) break;
    if (extended_position >= length_of(tokens) && !options.overlap) break;
    int64_t row_position = extended_position;
    while (row_position >= length_of(tokens)) row_position -= length_of(tokens) - (match.end + 1);
    if (!accepts(j, row_position)) break;
    extended.push_back(extended[static_cast<size_t>(extended_position)]);
    draft.tokens[static_cast<size_t>(j)] = extended.back();
    ++draft.count;
  }
  if (draft.count > 0) draft.match_len = static_cast<int32_t>(match.len);
  return draft;
}

// Returns the draft of a row with these tokens.
inline Draft compute_expected_draft(const Tokens& tokens, const LookupOptions& options) {
  const Match match = find_expected_match(tokens, options.min_n, options.max_n, options.match_policy);
  return copy_draft_after(tokens, match, options, [](int64_t, int64_t) { return true; });
}

// Returns the candidate of a ladder: the latest occurrence with the longest match of 1, 2, 4, 8 or 16 tokens.
inline Match find_expected_candidate(const Tokens& tokens) {
  Match best{-1, 0};
  int64_t best_size = 1;
  for (int64_t end = 0; end <= length_of(tokens) - 2; ++end) {
    const int64_t length = common_suffix_length(tokens, end, 16);
    int64_t size = 16;
    while (size > length) size /= 2;
    if (size < best_size) continue;
    best = {end, length};
    best_size = size;
  }
  return best;
}

// Returns the outcome byte of the token at `position`: 2 * (length of the candidate match before the token, at most
// 15), plus 1 if the candidate's next token is this token; 0 without a candidate.
inline int64_t compute_expected_outcome(const Tokens& tokens, int64_t position) {
  const Match match = find_expected_candidate({tokens.begin(), tokens.begin() + position});
  if (match.len == 0) return 0;
  const bool is_correct = tokens[static_cast<size_t>(match.end + 1)] == tokens[static_cast<size_t>(position)];
  return (match.len > 15 ? 15 : match.len) * 2 + is_correct;
}

// Returns the draft that an index with a ladder gives for the row. costs: [16][32], or null. knows_outcomes: if false,
// all outcomes count as 0. token_costs: receives the cost of each draft token.
inline Draft compute_expected_ladder_draft(const Tokens& tokens, const LookupOptions& options, const uint8_t* costs,
                                           int64_t cost_limit, bool knows_outcomes, std::vector<uint8_t>* token_costs) {
  const Match match = find_expected_candidate(tokens);
  int64_t total = 0;
  return copy_draft_after(tokens, match, options, [&](int64_t j, int64_t row_position) {
    if (costs == nullptr) return true;
    const int64_t row = match.len + j > 15 ? 15 : match.len + j;
    token_costs->push_back(costs[row * 32 + (knows_outcomes ? compute_expected_outcome(tokens, row_position) : 0)]);
    total += token_costs->back();
    if (total > cost_limit) token_costs->pop_back();
    return total <= cost_limit;
  });
}

}  // namespace ngram_npu::test
