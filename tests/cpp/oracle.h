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

// Returns the draft of a row with these tokens.
inline Draft compute_expected_draft(const Tokens& tokens, const LookupOptions& options) {
  const Match match = find_expected_match(tokens, options.min_n, options.max_n, options.match_policy);
  Draft draft = make_empty_draft(options.k);
  if (match.len == 0) return draft;
  Tokens extended = tokens;  // with overlap, the draft may continue with its own first tokens
  for (int64_t j = 0; j < options.k; ++j) {
    const int64_t extended_position = match.end + 1 + j;
    if (length_of(tokens) + j >= options.max_len) break;
    if (extended_position >= length_of(tokens) && !options.overlap) break;
    const int32_t token = extended[static_cast<size_t>(extended_position)];
    if (token < 0 || token >= options.vocab_size) break;
    extended.push_back(token);
    draft.tokens[static_cast<size_t>(j)] = extended.back();
    ++draft.count;
  }
  if (draft.count > 0) draft.match_len = static_cast<int32_t>(match.len);
  return draft;
}

}  // namespace ngram_npu::test
