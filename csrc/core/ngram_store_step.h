// ngram_store_step_: draft from other requests' text, and add the sampled tokens. Contract:
// docs/ops/ngram_store_step.md.
#pragma once

#include "core/ngram_store.h"

namespace ngram_npu {

struct StoreAccess {
  int32_t* words;  // core/ngram_store.h
  int64_t num_words;
};

struct NgramStoreStepParams {
  TokenRows<const int32_t> token_ids;  // [R, S]
  const int32_t* num_tokens;           // [R]
  const int32_t* num_sampled;          // [B]
  IndexArray row_indices;              // [B]
  IndexArray slot_indices;             // [B]; absent: the slot of a row is the row
  IndexArray scopes;                   // [B]; absent: all 0
  int64_t batch;
  StoreAccess store;
  TokenRows<int32_t> draft_token_ids;  // [B, k]
  int32_t* num_draft_tokens;           // [B]
  int32_t* match_len;                  // [B]
  TokenRows<uint8_t> draft_costs;      // [B, k]
  int64_t max_len;
  const void* costs;  // CostTable of [kCostRows, store::kStoreCostColumns]
  int64_t cost_limit;
  const int8_t* token_logits;
  bool fill;  // behind a draft from the store the text goes on
};

}  // namespace ngram_npu
