// Operators that process sampled tokens and prepare the drafter's batch. arguments.h describes F and its checks.
#pragma once

#include "api/arguments.h"
#include "core/bookkeeping.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(prepare_next_token_ids, PrepareNextTokenIdsParams)
NGRAM_NPU_OPERATOR(prepare_inputs_padded, PrepareInputsPaddedParams)
NGRAM_NPU_OPERATOR(prepare_inputs, PrepareInputsParams)
NGRAM_NPU_OPERATOR(prepare_input_ids_, PrepareInputIdsParams)

template <class F>
auto prepare_next_token_ids(In<F> sampled_token_ids, Optional<F> discard, Optional<F> backup_token_ids,
                            Optional<F> token_ids, Optional<F> num_tokens, Optional<F> row_indices,
                            int64_t vocab_size) {
  F call("prepare_next_token_ids");
  PrepareNextTokenIdsParams p{};
  p.sampled_token_ids = call.check_sampled_token_ids(call.view("sampled_token_ids", sampled_token_ids));
  p.batch = p.sampled_token_ids.rows;
  p.discard = call.check_mask(call.view("discard", discard), p.batch);
  const auto backup = call.view("backup_token_ids", backup_token_ids);
  const auto tokens = call.view("token_ids", token_ids);
  const auto lengths = call.view("num_tokens", num_tokens);
  const auto rows = call.view("row_indices", row_indices);
  if (backup) {
    p.backup_token_ids = call.check_int32s(*backup, p.batch);
    for (const auto& other : {tokens, lengths, rows}) call.check_is_none(other, "backup_token_ids is given");
  } else {
    if (!tokens) call.fail("token_ids", "a tensor (backup_token_ids is not given)", "None");
    if (!lengths) call.fail("num_tokens", "a tensor (token_ids is given)", "None");
    p.token_ids = call.template check_token_rows<const int32_t>(*tokens);
    p.num_tokens = call.check_int32s(*lengths, p.token_ids.rows);
    p.row_indices = call.check_row_indices(rows, "sampled_token_ids", p.batch, p.token_ids.rows,
                                           "number of rows of token_ids, because row_indices is None");
  }
  p.vocab_size = vocab_size;
  auto next_token_ids = call.empty(p.batch);
  auto num_sampled = call.empty(p.batch);
  p.next_token_ids = call.data(next_token_ids);
  p.num_sampled = call.data(num_sampled);
  if (p.batch > 0) call.template run<prepare_next_token_ids_op>(p);
  return call.results(next_token_ids, num_sampled);
}

template <class F>
auto prepare_inputs_padded(In<F> cu_num_draft_tokens, In<F> num_sampled, In<F> query_start_loc) {
  F call("prepare_inputs_padded");
  PrepareInputsPaddedParams p{};
  const TensorView drafts = call.view("cu_num_draft_tokens", cu_num_draft_tokens);
  p.cu_num_draft_tokens = call.check_int32s(drafts, kAnySize);
  p.batch = drafts.sizes[0];
  p.num_sampled = call.check_int32s(call.view("num_sampled", num_sampled), p.batch);
  p.query_start_loc = call.check_int32s(call.view("query_start_loc", query_start_loc), p.batch + 1);
  auto token_indices_to_sample = call.empty(p.batch);
  auto num_rejected = call.empty(p.batch);
  p.token_indices_to_sample = call.data(token_indices_to_sample);
  p.num_rejected = call.data(num_rejected);
  if (p.batch > 0) call.template run<prepare_inputs_padded_op>(p);
  return call.results(token_indices_to_sample, num_rejected);
}

template <class F>
auto prepare_inputs(In<F> query_start_loc, In<F> seq_lens, In<F> num_rejected, int64_t total_tokens) {
  F call("prepare_inputs");
  PrepareInputsParams p{};
  const TensorView starts = call.view("query_start_loc", query_start_loc);
  p.query_start_loc = call.check_query_start_loc(starts);
  p.batch = starts.sizes[0] - 1;
  p.seq_lens = call.check_int32s(call.view("seq_lens", seq_lens), p.batch);
  p.num_rejected = call.check_int32s(call.view("num_rejected", num_rejected), p.batch);
  call.check_scalar("total_tokens", total_tokens, 0, INT32_MAX);
  p.total_tokens = total_tokens;
  auto query_start_loc_out = call.empty(p.batch + 1);
  auto seq_lens_out = call.empty(p.batch);
  auto token_indices = call.empty(p.total_tokens);
  p.query_start_loc_out = call.data(query_start_loc_out);
  p.seq_lens_out = call.data(seq_lens_out);
  p.token_indices = call.data(token_indices);
  call.template run<prepare_inputs_op>(p);
  return call.results(query_start_loc_out, seq_lens_out, token_indices);
}

template <class F>
void prepare_input_ids_(In<F> input_ids, In<F> query_start_loc, In<F> prev_positions, In<F> next_token_ids,
                        In<F> draft_token_ids, In<F> num_scheduled_drafts, int64_t pad_token) {
  F call("prepare_input_ids_");
  PrepareInputIdsParams p{};
  const TensorView inputs = call.view("input_ids", input_ids);
  p.input_ids = call.check_output_int32s(inputs, kAnySize);
  p.num_inputs = inputs.sizes[0];
  const TensorView prev_positions_view = call.view("prev_positions", prev_positions);
  p.prev_positions = call.check_indices(prev_positions_view, kAnySize);
  p.batch = prev_positions_view.sizes[0];
  p.query_start_loc = call.check_int32s(call.view("query_start_loc", query_start_loc), p.batch + 1);
  p.draft_token_ids = call.template check_token_rows<const int32_t>(call.view("draft_token_ids", draft_token_ids));
  p.next_token_ids = call.check_int32s(call.view("next_token_ids", next_token_ids), p.draft_token_ids.rows);
  p.num_scheduled_drafts = call.check_int32s(call.view("num_scheduled_drafts", num_scheduled_drafts), p.batch);
  call.check_scalar("pad_token", pad_token, INT32_MIN, INT32_MAX);
  p.pad_token = static_cast<int32_t>(pad_token);
  call.check_no_overlap();
  if (p.batch > 0 && p.num_inputs > 0) call.template run<prepare_input_ids__op>(p);
}

}  // namespace ngram_npu::api
