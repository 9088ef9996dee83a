// The scan of a row, generic over a vector type; each isa_<name>.cpp compiles this file for its instruction set.
//
// The search keeps the best match so far and considers only longer matches. It goes through the ends in ascending order
// for the earliest match and in descending order for the latest, so that the first of equally long matches is the
// result. A match of `min_length` tokens can end at e only if t[e] is the row's last token and t[e-min_length+1] is the
// min_length-th token from the end. Loading and comparing these two tokens rejects almost every vector for any n. Each
// token is read from memory once; the second load hits the cache line of the first.
//
// Everything here has internal linkage, because the linker must not merge functions of the same name that were compiled
// for different instruction sets.
#pragma once

#include "cpu/machine.h"

namespace ngram_npu::cpu {
namespace {

// Vec provides kLanes, Reg, splat(token) and compare(tokens, Reg), which sets bit i of its result if token i and lane i
// are equal. The tokens need not be aligned.
template <class Vec>
class Lookup {
 public:
  Lookup(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n)
      : tokens_(tokens), last_position_(num_tokens - 1), max_n_(max_n) {
    set_min_length(min_n);
  }

  Match find_earliest_match() {
    int64_t end = min_length_ - 1;
    if (search_blocks_ascending<kUnrolledVectors>(end) || search_blocks_ascending<1>(end)) return best_match_;
    for (; end < last_position_; ++end) {
      if (is_candidate(end) && update_best(end)) break;
    }
    return best_match_;
  }

  Match find_latest_match() {
    int64_t end = last_position_;
    if (search_blocks_descending<kUnrolledVectors>(end) || search_blocks_descending<1>(end)) return best_match_;
    for (--end; end >= min_length_ - 1; --end) {
      if (is_candidate(end) && update_best(end)) break;
    }
    return best_match_;
  }

 private:
  static constexpr int64_t kUnrolledVectors = 4;
  // One page, because the hardware's own prefetch stops at page boundaries (128 rows x 32k: 0.43 -> 0.34 ms).
  static constexpr int64_t kPrefetchBytes = 4096;
  static constexpr int64_t kLineBytes = 64;
  static_assert(Vec::kLanes <= 64);

  void set_min_length(int64_t min_length) {
    min_length_ = min_length;
    last_token_ = Vec::splat(tokens_[last_position_]);
    nth_last_token_ = Vec::splat(min_length - 1 <= last_position_ ? tokens_[last_position_ - (min_length - 1)] : 0);
  }

  // Searches blocks of num_vectors vectors upwards from `end` while a whole block fits. Returns true if the search is
  // complete, because no longer match is possible.
  template <int64_t num_vectors>
  bool search_blocks_ascending(int64_t& end) {
    constexpr int64_t block = num_vectors * Vec::kLanes;
    for (; end + block <= last_position_; end += block) {
      prefetch<block>(tokens_ + end, kPrefetchBytes);
      uint64_t hits[num_vectors];
      if (!find_hits<num_vectors>(end, hits)) continue;
      for (int64_t u = 0; u < num_vectors; ++u) {
        if (hits[u] && verify_hits_ascending(end + u * Vec::kLanes, hits[u])) return true;
      }
    }
    return false;
  }

  // Searches blocks downwards from `end`, which is exclusive. The lower bound is computed for each block, because
  // min_length_ may increase during the loop.
  template <int64_t num_vectors>
  bool search_blocks_descending(int64_t& end) {
    constexpr int64_t block = num_vectors * Vec::kLanes;
    for (; end - block >= min_length_ - 1; end -= block) {
      prefetch<block>(tokens_ + end - block, -kPrefetchBytes);
      uint64_t hits[num_vectors];
      if (!find_hits<num_vectors>(end - block, hits)) continue;
      for (int64_t u = num_vectors - 1; u >= 0; --u) {
        if (hits[u] && verify_hits_descending(end - block + u * Vec::kLanes, hits[u])) return true;
      }
    }
    return false;
  }

  // The address may be outside the row, because a prefetch never faults.
  template <int64_t block>
  static void prefetch(const int32_t* tokens, int64_t distance) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(tokens) + static_cast<uintptr_t>(distance);
    for (uintptr_t byte = 0; byte < block * sizeof(int32_t); byte += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(address + byte));
    }
  }

  // Sets the bits of the ends, in the block starting at `end`, at which the last token and the min_length-th token from
  // the end are equal to the row's. Returns whether a bit is set.
  template <int64_t num_vectors>
  bool find_hits(int64_t end, uint64_t* hits) const {
    const int32_t* last_tokens = tokens_ + end;
    const int32_t* nth_last_tokens = last_tokens - (min_length_ - 1);
    uint64_t combined_hits = 0;
    for (int64_t u = 0; u < num_vectors; ++u) {
      hits[u] = Vec::compare(last_tokens + u * Vec::kLanes, last_token_) &
                Vec::compare(nth_last_tokens + u * Vec::kLanes, nth_last_token_);
      combined_hits |= hits[u];
    }
    return combined_hits != 0;
  }

  // Verifies the hits of the vector that begins at `end`, in ascending order. Returns true if the search is complete.
  bool verify_hits_ascending(int64_t end, uint64_t hits) {
    for (hits = filter_hits(end, hits); hits; hits &= hits - 1) {
      if (update_best(end + __builtin_ctzll(hits))) return true;
    }
    return false;
  }

  // Verifies the hits of the vector that begins at `end`, in descending order. Returns true if the search is complete.
  bool verify_hits_descending(int64_t end, uint64_t hits) {
    // A hit in a vector at higher positions may have increased min_length_ above the number of tokens before this
    // vector. Each hit is then verified individually.
    if (end >= min_length_ - 1) hits = filter_hits(end, hits);
    while (hits) {
      const int bit = 63 - __builtin_clzll(hits);
      if (update_best(end + bit)) return true;
      hits &= ~(uint64_t{1} << bit);
    }
    return false;
  }

  // Keeps the hits at which the tokens between the two tokens that find_hits() compared are also equal.
  uint64_t filter_hits(int64_t end, uint64_t hits) const {
    for (int64_t j = 1; j < min_length_ - 1 && hits; ++j) {
      hits &= Vec::compare(tokens_ + end - j, Vec::splat(tokens_[last_position_ - j]));
    }
    return hits;
  }

  bool is_candidate(int64_t end) const {
    return tokens_[end] == tokens_[last_position_] &&
           tokens_[end - (min_length_ - 1)] == tokens_[last_position_ - (min_length_ - 1)];
  }

  // Verifies one end and updates the best match. Returns true if no longer match is possible.
  bool update_best(int64_t end) {
    const int64_t limit = smaller(max_n_, end + 1);
    int64_t len = 0;
    while (len < limit && tokens_[end - len] == tokens_[last_position_ - len]) ++len;
    if (len < min_length_) return false;
    best_match_ = {end, len};
    if (len == max_n_) return true;
    set_min_length(len + 1);
    return false;
  }

  const int32_t* tokens_;
  int64_t last_position_;
  int64_t max_n_;
  int64_t min_length_ = 0;
  typename Vec::Reg last_token_{};
  typename Vec::Reg nth_last_token_{};
  Match best_match_{-1, 0};
};

template <class Vec>
Match find_match_with(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  Lookup<Vec> lookup(tokens, num_tokens, min_n, max_n);
  return match_policy == kEarliest ? lookup.find_earliest_match() : lookup.find_latest_match();
}

}  // namespace
}  // namespace ngram_npu::cpu
