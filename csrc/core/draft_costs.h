// The expected number of accepted tokens of a draft, computed from the costs of its tokens in 1/16 bit. merge_drafts_
// uses these functions. Definition: docs/ops/merge_drafts.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// 2^(-cost / 16) with 16 fractional bits, for cost 0, and for the cost after that of `probability`. Repeated
// multiplication gives the same integers everywhere.
constexpr uint32_t kFirstProbability = 65536;
NGRAM_FN constexpr uint32_t next_probability(uint32_t probability) {
  return static_cast<uint32_t>(uint64_t{probability} * 62757 >> 16);
}

// The probability of each cost.
struct AcceptanceProbabilities {
  uint32_t values[256];
  constexpr AcceptanceProbabilities() : values() {
    values[0] = kFirstProbability;
    for (int i = 1; i < 256; ++i) values[i] = next_probability(values[i - 1]);
  }
  NGRAM_FN uint32_t operator[](uint32_t cost) const { return values[cost]; }
};

// The expected number of accepted tokens among the first `count` tokens of a draft, in 65536ths. Kernels may have their
// own copies of the probabilities and the costs.
template <class Probabilities, class Costs>
NGRAM_FN uint32_t expected_accepted_tokens(const Probabilities& probabilities, const Costs& costs, int64_t count) {
  uint32_t expected_tokens = 0, total_cost = 0;
  for (int64_t j = 0; j < count; ++j) {
    total_cost += costs[j];
    if (total_cost > 255) break;
    expected_tokens += probabilities[total_cost];
  }
  return expected_tokens;
}

}  // namespace ngram_npu
