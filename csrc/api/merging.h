// Body of the operator that chooses between drafts of a neural drafter and of n-grams: check the arguments, make the
// outputs, call the kernel. `F` is the front end, torch or numpy (arguments.h).
#pragma once

#include "api/arguments.h"
#include "core/merging.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(merge_drafts_, MergeDraftsParams)

template <class F>
auto merge_drafts_(In<F> neural_draft_token_ids, In<F> ngram_draft_token_ids, In<F> num_ngram_draft_tokens,
                   In<F> match_len, Optional<F> num_neural_draft_tokens, Optional<F> draft_costs,
                   Optional<F> neural_draft_costs, Optional<F> match_costs, Optional<F> row_indices,
                   Optional<F> num_sampled, Optional<F> num_scheduled_drafts, Optional<F> neural_acceptance,
                   int64_t min_match_len, int64_t threshold, bool extend) {
  F call("merge_drafts_");
  MergeDraftsParams p{};
  const TensorView neural = call("neural_draft_token_ids", neural_draft_token_ids);
  call.matrix(neural, {DType::kInt32, DType::kInt64});
  p.neural_draft_token_ids = neural.data;
  p.batch = neural.sizes[0];
  p.neural_width = neural.sizes[1];
  p.neural_stride = neural.strides[0];
  p.token_bytes = static_cast<int32_t>(neural.item_bytes);
  const TensorView ngram = call("ngram_draft_token_ids", ngram_draft_token_ids);
  p.ngram_draft_token_ids = call.template rows<const int32_t>(ngram);
  const int64_t k = ngram.sizes[1];
  call.shape(ngram, p.batch, k);
  call.scalar("ngram_draft_token_ids width", k, 0, kMaxDraftTokens);
  call.at_most("neural_draft_token_ids", "width", p.neural_width, k, "width of ngram_draft_token_ids");
  p.num_ngram_draft_tokens = call.int32s(call("num_ngram_draft_tokens", num_ngram_draft_tokens), p.batch);
  p.match_len = call.int32s(call("match_len", match_len), p.batch);
  if (const auto counts = call("num_neural_draft_tokens", num_neural_draft_tokens)) {
    p.num_neural_draft_tokens = call.int32s(*counts, p.batch);
  }

  const auto costs_of = [&](const std::optional<TensorView>& view, int64_t width) {
    const TokenRows<uint8_t> rows = view ? call.costs(*view, p.batch, width) : TokenRows<uint8_t>{};
    return TokenRows<const uint8_t>{rows.data, rows.rows, rows.capacity, rows.stride};
  };
  const auto by_draft = call("draft_costs", draft_costs);
  const auto by_match = call("match_costs", match_costs);
  const auto of_neural = call("neural_draft_costs", neural_draft_costs);
  p.draft_costs = costs_of(by_draft, k);
  if (by_match) {
    if (by_draft) call.absent(by_match, "draft_costs is given");
    call.vector(*by_match, {DType::kUInt8}, kCostRows);
    p.match_costs = static_cast<const uint8_t*>(by_match->data);
  }
  p.neural_draft_costs = costs_of(of_neural, p.neural_width);
  constexpr const char* kWithoutCosts = "without draft_costs or match_costs";
  if (!by_draft && !by_match) {
    call.absent(of_neural, kWithoutCosts);
    call.at_most("threshold", "threshold", threshold, 0, kWithoutCosts);
  }

  const auto rows = call("row_indices", row_indices);
  const auto sampled = call("num_sampled", num_sampled);
  if (sampled) p.num_sampled = call.int32s(*sampled, p.batch);
  if (const auto verified = call("num_scheduled_drafts", num_scheduled_drafts)) {
    p.num_scheduled_drafts = call.int32s(*verified, p.batch);
  }
  if (const auto acceptance = call("neural_acceptance", neural_acceptance)) {
    p.neural_acceptance = call.template rows<int32_t>(*acceptance, Arguments::kWrite);
    call.shape(*acceptance, acceptance->sizes[0], kAcceptanceColumns);
    if (!sampled) call.fail("num_sampled", "a tensor (neural_acceptance is given)", "None");
    p.row_indices = call.row_indices(rows, "neural_draft_token_ids", p.batch, p.neural_acceptance.rows,
                                     "rows of neural_acceptance, without row_indices");
  } else {
    p.row_indices = call.indices(rows, p.batch);
  }
  call.scalar("min_match_len", min_match_len, 0, INT32_MAX);
  p.min_match_len = min_match_len;
  call.scalar("threshold", threshold, 0, INT32_MAX);
  p.threshold = threshold;
  p.extend = extend;
  call.disjoint();

  auto draft_token_ids = call.empty_tokens(p.token_bytes, p.batch, k);
  auto num_draft_tokens = call.empty(p.batch);
  auto draft_source = call.empty(p.batch);
  p.draft_token_ids = call.tokens(draft_token_ids);
  p.num_draft_tokens = call.data(num_draft_tokens);
  p.draft_source = call.data(draft_source);
  if (p.batch > 0) call.template run<merge_drafts__op>(p);
  return call.results(draft_token_ids, num_draft_tokens, draft_source);
}

}  // namespace ngram_npu::api
