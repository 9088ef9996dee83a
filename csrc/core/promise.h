// The promise of a draft, from the costs of its tokens. Definition: docs/ops/ngram_store_step.md, "Choice".
#pragma once

#include "core/common.h"

namespace ngram_npu {

// 2^(-cost / 16) in 65536ths, by repeated multiplication: the same integers everywhere.
struct Powers {
  uint32_t of[256];
  constexpr Powers() : of() {
    of[0] = 65536;
    for (int i = 1; i < 256; ++i) of[i] = static_cast<uint32_t>(uint64_t{of[i - 1]} * 62757 >> 16);
  }
};

// The expected number of accepted tokens among a draft's first `count`, in 65536ths. costs[j] is in sixteenths of a
// bit.
template <class Costs>
NGRAM_FN uint32_t promise_of(const Powers& powers, const Costs& costs, int64_t count) {
  uint32_t promise = 0, total = 0;
  for (int64_t j = 0; j < count; ++j) {
    total += costs[j];
    if (total > 255) break;
    promise += powers.of[total];
  }
  return promise;
}

}  // namespace ngram_npu
