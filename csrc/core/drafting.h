// The host's drafting core, for a caller without Python: one entry drafts, the other takes text in, so that drafts can
// be handed out before anything learns. No entry allocates, starts a thread, or holds a lock while it calls elsewhere.
#pragma once

#include "core/ngram_index_append.h"
#include "core/ngram_index_propose.h"
#include "core/ngram_store_step.h"

namespace ngram_npu {

NGRAM_FN int64_t scope_of(const IndexArray& scopes, int64_t i) { return scopes.bytes == 0 ? 0 : scopes[i]; }

// The store's part in a draft. `store.words` null: it is not asked.
struct StoreLookup {
  StoreAccess store;
  IndexArray scopes;  // [B]; absent: all 0
  const void* costs;  // CostTable of [kCostRows, store::kStoreCostColumns]
  int64_t cost_limit;
  const int8_t* token_logits = nullptr;
};

// Look up, weigh costs, ask the store, fill, write. Results are those of ngram_propose (without index words) or
// ngram_index_propose_, then of the drafts of ngram_store_step_, which finds no busy store.
struct DraftParams {
  NgramIndexProposeParams lookup;
  StoreLookup store;
};

// Rows that have grown, for the store. As in DraftParams, the caller lets nobody else use the store meanwhile.
struct StoreIntakeParams {
  StoreAccess store;  // words null: nothing is stored
  TokenRows<const int32_t> token_ids;
  const int32_t* num_tokens;   // [R]
  const int32_t* num_sampled;  // [B]: the tokens at each row's end that are taken; none: the row is left out
  IndexArray row_indices;      // [B]
  IndexArray slot_indices;     // [B]; absent: the slot of a row is the row
  IndexArray scopes;           // [B]; absent: all 0
  int64_t batch;
};

// Enter rows into the index, then into the store. Either may be without words.
struct TakeInParams {
  NgramIndexAppendParams index;
  int64_t catch_up_tokens;  // the most that the index takes in; negative: no limit
  StoreIntakeParams store;
};

}  // namespace ngram_npu

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_draft(const ngram_npu::DraftParams* params);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_take_in(const ngram_npu::TakeInParams* params);
