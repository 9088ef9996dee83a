// Entering rows' new text into the store that requests share: the definition is in docs/ops/ngram_store_step.md,
// "Entering".
#pragma once

#include "core/drafting.h"
#include "cpu/ngram_store.h"

namespace ngram_npu::cpu {

struct StoredRow {
  const int32_t* tokens;  // null: takes no part
  int64_t length;
  uint64_t scope;
};

// `row` as a request with so many new tokens sees it.
inline StoredRow stored_row(const TokenRows<const int32_t>& rows, int64_t row, const int32_t* num_tokens,
                            int32_t num_sampled, int64_t scope) {
  if (!rows.has(row) || num_sampled <= 0 || num_tokens[row] < 1 || num_tokens[row] > rows.capacity) return {};
  return {rows[row], num_tokens[row], static_cast<uint64_t>(scope)};
}

// Enters rows' new tokens.
void take_in(const StoreIntakeParams& params);

}  // namespace ngram_npu::cpu
