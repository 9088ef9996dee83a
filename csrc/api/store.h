// Operators of the store that requests share. F is the front end (torch or numpy): In<F> is its type of an argument,
// and an F (`call`) checks the arguments of one call and runs the operator (api/arguments.h).
#pragma once

#include "api/arguments.h"
#include "core/store.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(ngram_store_step_, NgramStoreStepParams)
NGRAM_NPU_OPERATOR(ngram_store_finish_, NgramStoreFinishParams)

template <class F>
StoreAccess check_store(F& call, In<F> store) {
  const TensorView view = call.view("store", store);
  int32_t* words = call.check_output_int32s(view, kAnySize);
  return {words, view.sizes[0]};
}

template <class F>
void ngram_store_step_(In<F> token_ids, In<F> num_tokens, In<F> num_sampled, In<F> store, Optional<F> row_indices,
                       Optional<F> slot_indices, Optional<F> scopes, In<F> draft_token_ids, In<F> num_draft_tokens,
                       In<F> match_len, In<F> draft_costs, int64_t max_len, In<F> costs, int64_t cost_limit, bool fill,
                       Optional<F> token_logits) {
  F call("ngram_store_step_");
  NgramStoreStepParams p{};
  check_grown_rows(call, p, token_ids, num_tokens, num_sampled, row_indices);
  p.store = check_store(call, store);
  p.slot_indices = call.check_indices(call.view("slot_indices", slot_indices), p.batch);
  p.scopes = call.check_indices(call.view("scopes", scopes), p.batch);
  const TensorView drafts_view = call.view("draft_token_ids", draft_token_ids);
  p.draft_token_ids = call.template check_token_rows<int32_t>(drafts_view, Arguments::kWrite);
  call.check_shape(drafts_view, p.batch, drafts_view.sizes[1]);
  call.check_scalar("draft_token_ids width", drafts_view.sizes[1], 0, kMaxDraftTokens);
  p.num_draft_tokens = call.check_output_int32s(call.view("num_draft_tokens", num_draft_tokens), p.batch);
  p.match_len = call.check_output_int32s(call.view("match_len", match_len), p.batch);
  p.draft_costs =
      call.check_costs(call.view("draft_costs", draft_costs), p.batch, drafts_view.sizes[1], Arguments::kWrite);
  p.max_len = max_len;
  const CostTable table = call.check_cost_table(call.view("costs", costs), store::kStoreCostColumns,
                                                call.view("token_logits", token_logits));
  p.costs = table.cells;
  p.token_logits = table.token_logits;
  call.check_scalar("cost_limit", cost_limit, 0, INT32_MAX);
  p.cost_limit = cost_limit;
  p.fill = fill;
  call.check_no_overlap();
  if (p.batch > 0) call.template run<ngram_store_step__op>(p);
}

template <class F>
void ngram_store_finish_(In<F> store, In<F> slot_indices) {
  F call("ngram_store_finish_");
  NgramStoreFinishParams p{};
  p.store = check_store(call, store);
  const TensorView slots = call.view("slot_indices", slot_indices);
  p.slot_indices = call.check_indices(slots, kAnySize);
  p.count = slots.sizes[0];
  call.check_no_overlap();
  if (p.count > 0) call.template run<ngram_store_finish__op>(p);
}

}  // namespace ngram_npu::api
