// The expected number of accepted tokens of a draft, computed from the costs of its tokens in 1/16 bit. merge_drafts_
// uses these functions. Definition: docs/ops/merge_drafts.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// 2^(-cost / 16) for each cost, with 16 fractional bits. Repeated multiplication gives the same integers everywhere.
struct AcceptanceProbabilities {
  uint32_t values[256];
  constexpr AcceptanceProbabilities() : values() {
    values[0] = 65536;
    for (int i = 1; i < 256; ++i) values[i] = static_cast<uint32_t>(uint64_t{values[i - 1]} * 62757 >> 16);
  }
};

// The expected number of accepted tokens among the first `count` tokens of a draft, in 65536ths.
NGRAM_FN uint32_t expected_accepted_tokens(const AcceptanceProbabilities& probabilities, Gm<const uint8_t> costs,
                                           int64_t count) {
  uint32_t expected_tokens = 0, total_cost = 0;
  for (int64_t j = 0; j < count; ++j) {
    total_cost += costs[j];
    if (total_cost > 255) break;
    expected_tokens += probabilities.values[total_cost];
  }
  return expected_tokens;
}

}  // namespace ngram_npu
