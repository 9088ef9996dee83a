// The operator that chooses between the neural draft and the n-gram draft. core/merging.h describes its parameters.
#pragma once

#include "api/arguments.h"
#include "core/merging.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(merge_drafts_, MergeDraftsParams)

template <class F>
auto merge_drafts_(In<F> neural_draft_token_ids, In<F> ngram_draft_token_ids, In<F> num_ngram_draft_tokens,
                   In<F> match_len, Optional<F> num_neural_draft_tokens, Optional<F> draft_costs,
                   Optional<F> neural_draft_costs, Optional<F> row_indices, Optional<F> num_sampled,
                   Optional<F> num_scheduled_drafts, Optional<F> neural_acceptance, int64_t min_match_len,
                   int64_t threshold, bool extend) {
  F call("merge_drafts_");
  MergeDraftsParams p{};
  const TensorView neural_view = call.view("neural_draft_token_ids", neural_draft_token_ids);
  call.check_matrix(neural_view, {DType::kInt32, DType::kInt64});
  p.neural_draft_token_ids = neural_view.data;
  p.batch = neural_view.sizes[0];
  p.neural_width = neural_view.sizes[1];
  p.neural_stride = neural_view.strides[0];
  p.token_bytes = static_cast<int32_t>(neural_view.item_bytes);
  const TensorView ngram_view = call.view("ngram_draft_token_ids", ngram_draft_token_ids);
  p.ngram_draft_token_ids = call.template check_token_rows<const int32_t>(ngram_view);
  const int64_t k = ngram_view.sizes[1];
  call.check_shape(ngram_view, p.batch, k);
  call.check_scalar("ngram_draft_token_ids width", k, 0, kMaxDraftTokens);
  call.check_at_most("neural_draft_token_ids", "width", p.neural_width, k, "width of ngram_draft_token_ids");
  p.num_ngram_draft_tokens = call.check_int32s(call.view("num_ngram_draft_tokens", num_ngram_draft_tokens), p.batch);
  p.match_len = call.check_int32s(call.view("match_len", match_len), p.batch);
  if (const auto counts = call.view("num_neural_draft_tokens", num_neural_draft_tokens)) {
    p.num_neural_draft_tokens = call.check_int32s(*counts, p.batch);
  }

  const auto check_optional_costs = [&](const std::optional<TensorView>& view, int64_t width) {
    if (!view) return TokenRows<const uint8_t>{};
    call.check_matrix(*view, {DType::kUInt8});
    call.check_shape(*view, p.batch, width);
    return TokenRows<const uint8_t>{static_cast<const uint8_t*>(view->data), p.batch, width, view->strides[0]};
  };
  const auto draft_costs_view = call.view("draft_costs", draft_costs);
  const auto neural_costs_view = call.view("neural_draft_costs", neural_draft_costs);
  p.draft_costs = check_optional_costs(draft_costs_view, k);
  p.neural_draft_costs = check_optional_costs(neural_costs_view, p.neural_width);
  constexpr const char* kNoCosts = "draft_costs is None";
  if (!draft_costs_view) {
    call.check_is_none(neural_costs_view, kNoCosts);
    call.check_at_most("threshold", "threshold", threshold, 0, kNoCosts);
  }

  const auto rows_view = call.view("row_indices", row_indices);
  const auto sampled_view = call.view("num_sampled", num_sampled);
  if (sampled_view) p.num_sampled = call.check_int32s(*sampled_view, p.batch);
  if (const auto scheduled_view = call.view("num_scheduled_drafts", num_scheduled_drafts)) {
    p.num_scheduled_drafts = call.check_int32s(*scheduled_view, p.batch);
  }
  if (const auto acceptance = call.view("neural_acceptance", neural_acceptance)) {
    p.neural_acceptance = call.template check_token_rows<int32_t>(*acceptance, Arguments::kWrite);
    call.check_shape(*acceptance, acceptance->sizes[0], kAcceptanceColumns);
    if (!sampled_view) call.fail("num_sampled", "a tensor (neural_acceptance is given)", "None");
    p.row_indices = call.check_row_indices(rows_view, "neural_draft_token_ids", p.batch, p.neural_acceptance.rows,
                                           "number of rows of neural_acceptance, because row_indices is None");
  } else {
    p.row_indices = call.check_indices(rows_view, p.batch);
  }
  call.check_scalar("min_match_len", min_match_len, 0, INT32_MAX);
  p.min_match_len = min_match_len;
  call.check_scalar("threshold", threshold, 0, INT32_MAX);
  p.threshold = threshold;
  p.extend = extend;
  call.check_no_overlap();

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
