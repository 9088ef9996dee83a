// Rows that have broken, or could break, a vectorised lookup. Each generator calls visit(tokens, min_n, max_n) and
// stops when it returns false, so that one bug gives one message.
#pragma once

#include <cstdint>
#include <limits>

#include "choices.h"
#include "oracle.h"

namespace ngram_npu::test {

struct NgramRange {
  int64_t min_n;
  int64_t max_n;
};

inline Tokens random_row(RandomChoices& random, int64_t length, int64_t alphabet) {
  Tokens tokens(static_cast<size_t>(length));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(alphabet));
  return tokens;
}

inline Tokens bits(uint32_t word, int64_t length) {
  Tokens tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(word >> i & 1));
  return tokens;
}

inline void append(Tokens& tokens, const Tokens& more) { tokens.insert(tokens.end(), more.begin(), more.end()); }

// All rows over {0, 1} up to a length.
template <class Visit>
bool every_binary_row(int64_t max_length, const Visit& visit) {
  constexpr NgramRange ranges[] = {{1, 1}, {1, 2}, {2, 2}, {1, 3},  {2, 4}, {3, 3},
                                   {2, 5}, {4, 4}, {1, 8}, {5, 12}, {1, 64}};
  for (int64_t length = 0; length <= max_length; ++length) {
    for (uint32_t word = 0; word < uint32_t{1} << length; ++word) {
      const Tokens tokens = bits(word, length);
      for (const NgramRange& n : ranges) {
        if (!visit(tokens, n.min_n, n.max_n)) return false;
      }
    }
  }
  return true;
}

// All pairs of a short head and tail, so far apart that the head lies in another vector, block or pass than the tail.
template <class Visit>
bool every_head_and_tail(const Visit& visit) {
  for (const int64_t gap : {3, 10, 21, 27, 53, 59, 118}) {
    for (uint32_t word = 0; word < uint32_t{1} << 10; ++word) {
      Tokens tokens = bits(word & 31, 5);
      append(tokens, Tokens(static_cast<size_t>(gap), 2));
      append(tokens, bits(word >> 5, 5));
      for (const NgramRange& n : {NgramRange{1, 5}, NgramRange{2, 3}, NgramRange{3, 64}}) {
        if (!visit(tokens, n.min_n, n.max_n)) return false;
      }
    }
  }
  return true;
}

// Lengths around every edge: all of them up to three of the largest blocks (16 lanes x 4), then around pages.
inline std::vector<int64_t> edge_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t length = 0; length <= 3 * 64 + 3; ++length) lengths.push_back(length);
  for (const int64_t edge : {256, 512, 1024, 2048}) {
    for (int64_t off = -1; off <= 2; ++off) lengths.push_back(edge + off);
  }
  return lengths;
}

inline std::vector<NgramRange> wide_ranges() {
  std::vector<NgramRange> ranges;
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 33, 64}) {
    ranges.push_back({n, n});
    if (n > 1) ranges.push_back({1, n});
    if (n > 3) ranges.push_back({n / 2, n});
  }
  return ranges;
}

template <class Visit>
bool rows_of_every_length(const Visit& visit) {
  RandomChoices random(20240229);
  for (const int64_t length : edge_lengths()) {
    for (const int64_t alphabet : {2, 3, 7}) {
      const Tokens tokens = random_row(random, length, alphabet);
      for (const NgramRange& n : wide_ranges()) {
        if (!visit(tokens, n.min_n, n.max_n)) return false;
      }
    }
  }
  return true;
}

// Periodic rows: matches overlap the suffix, and reach max_n everywhere or just miss it.
template <class Visit>
bool periodic_rows(const Visit& visit) {
  RandomChoices random(7);
  for (const int64_t length : edge_lengths()) {
    for (const int64_t period : {1, 2, 3, 5, 8, 17, 63, 64, 65}) {
      const Tokens unit = random_row(random, period, 4);
      Tokens tokens;
      for (int64_t i = 0; i < length; ++i) tokens.push_back(unit[static_cast<size_t>(i % period)]);
      for (const NgramRange& n : {NgramRange{1, 3}, NgramRange{2, 64}, NgramRange{33, 33}, NgramRange{64, 64}}) {
        if (!visit(tokens, n.min_n, n.max_n)) return false;
      }
      if (length == 0) continue;
      tokens[static_cast<size_t>(random.below(length))] = 9;
      if (!visit(tokens, 1, 64)) return false;
    }
  }
  return true;
}

// A copy of the suffix near the row's start, among tokens equal to the last one: a descending pass finds a long match
// there, and the tokens below have no room for a longer one.
template <class Visit>
bool rows_that_raise_the_bar(const Visit& visit) {
  RandomChoices random(11);
  for (int64_t round = 0; round < 3000; ++round) {
    const int64_t suffix_length = 2 + random.below(40);
    Tokens suffix(static_cast<size_t>(suffix_length), 1);
    for (int64_t i = random.below(3); i > 0; --i) suffix[static_cast<size_t>(random.below(suffix_length - 1))] = 0;
    Tokens tokens(static_cast<size_t>(random.below(70)), 1);
    append(tokens, suffix);
    append(tokens, Tokens(static_cast<size_t>(random.below(70)), random.below(2) == 0 ? 1 : 2));
    if (random.below(2) == 0) tokens.push_back(3);
    append(tokens, suffix);
    const int64_t min_n = 1 + random.below(3);
    if (!visit(tokens, min_n, min_n + random.below(64 - min_n + 1))) return false;
  }
  return true;
}

// Exactly one occurrence, at every position of a row.
template <class Visit>
bool single_occurrences(const Visit& visit) {
  for (const int64_t length : {20, 33, 34, 66, 131, 197}) {
    for (const int64_t n : {1, 2, 3, 5, 8}) {
      for (int64_t end = n - 1; end < length - n; ++end) {
        Tokens tokens;
        for (int64_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(1000 + i));
        for (int64_t j = 0; j < n; ++j) {
          tokens[static_cast<size_t>(end - j)] = tokens[static_cast<size_t>(length - 1 - j)];
        }
        for (const NgramRange& range : {NgramRange{1, 8}, NgramRange{n, n}, NgramRange{n + 1, n + 1}}) {
          if (!visit(tokens, range.min_n, range.max_n)) return false;
        }
      }
    }
  }
  return true;
}

// Token ids are any 32 bits.
template <class Visit>
bool extreme_tokens(const Visit& visit) {
  constexpr int32_t values[] = {-1, 0, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  RandomChoices random(3);
  for (int64_t length = 0; length <= 140; ++length) {
    Tokens tokens = random_row(random, length, 4);
    for (int32_t& token : tokens) token = values[token];
    for (const NgramRange& n : {NgramRange{1, 1}, NgramRange{1, 4}, NgramRange{3, 8}}) {
      if (!visit(tokens, n.min_n, n.max_n)) return false;
    }
  }
  return true;
}

}  // namespace ngram_npu::test
