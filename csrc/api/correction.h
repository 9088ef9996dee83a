// Operators that correct the counts of asynchronous scheduling, which assumes that all drafts are accepted.
#pragma once

#include "api/arguments.h"
#include "core/correction.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(correct_num_computed_tokens_, CorrectNumComputedTokensParams)
NGRAM_NPU_OPERATOR(compute_slot_mapping_, ComputeSlotMappingParams)
NGRAM_NPU_OPERATOR(correct_spec_state_, CorrectSpecStateParams)

constexpr const char* kSizeOfPrevPositions = "size of prev_positions";

template <class F>
CorrectNumComputedTokensParams check_counts(F& call, In<F> num_computed_tokens, In<F> num_accepted_tokens,
                                            In<F> prev_positions, In<F> num_sampled_prev, In<F> num_draft_prev,
                                            In<F> host_num_computed_tokens) {
  CorrectNumComputedTokensParams p{};
  const TensorView computed_view = call.view("num_computed_tokens", num_computed_tokens);
  const TensorView accepted_view = call.view("num_accepted_tokens", num_accepted_tokens);
  const TensorView prev_positions_view = call.view("prev_positions", prev_positions);
  const TensorView sampled_view = call.view("num_sampled_prev", num_sampled_prev);
  const TensorView draft_view = call.view("num_draft_prev", num_draft_prev);
  p.prev_positions = call.check_indices(prev_positions_view, kAnySize);
  p.batch = prev_positions_view.sizes[0];
  p.num_computed_tokens =
      call.template check_output_vector<int32_t>(computed_view, DType::kInt32, p.batch, kSizeOfPrevPositions);
  p.num_accepted_tokens =
      call.template check_output_vector<int32_t>(accepted_view, DType::kInt32, p.batch, kSizeOfPrevPositions);
  p.num_sampled_prev = call.check_int32s(sampled_view, kAnySize);
  p.num_draft_prev = call.check_int32s(draft_view, kAnySize);
  p.num_previous = smaller(computed_view.sizes[0], smaller(sampled_view.sizes[0], draft_view.sizes[0]));
  p.host_num_computed_tokens =
      call.check_int32s(call.view("host_num_computed_tokens", host_num_computed_tokens), p.batch);
  return p;
}

// The caller has already checked `starts` and `positions`.
template <class F>
ComputeSlotMappingParams check_slots(F& call, int64_t batch, const TensorView& starts, const TensorView& positions,
                                     In<F> block_table, Optional<F> row_indices, In<F> slot_mapping,
                                     const SlotLayout& layout, int64_t pad_id) {
  ComputeSlotMappingParams p{};
  p.batch = batch;
  p.query_start_loc = static_cast<const int32_t*>(starts.data);
  p.positions = static_cast<const int64_t*>(positions.data);
  p.num_positions = positions.sizes[0];
  p.block_table = call.template check_token_rows<const int32_t>(call.view("block_table", block_table));
  p.row_indices =
      call.check_row_indices(call.view("row_indices", row_indices), "query_start_loc", batch, p.block_table.rows,
                             "number of rows of block_table, because row_indices is None");
  const TensorView slots = call.view("slot_mapping", slot_mapping);
  call.check_vector(slots, {DType::kInt32, DType::kInt64}, -1, Arguments::kWrite);
  p.slot_mapping = slots.data;
  p.num_slots = slots.sizes[0];
  p.slot_bytes = static_cast<int32_t>(slots.item_bytes);
  call.check_slot_layout(layout);
  p.layout = layout;
  if (p.slot_bytes == 4) call.check_scalar("pad_id", pad_id, INT32_MIN, INT32_MAX);
  p.pad_id = pad_id;
  return p;
}

template <class F>
void correct_num_computed_tokens_(In<F> num_computed_tokens, In<F> num_accepted_tokens, In<F> prev_positions,
                                  In<F> num_sampled_prev, In<F> num_draft_prev, In<F> host_num_computed_tokens) {
  F call("correct_num_computed_tokens_");
  auto p = check_counts(call, num_computed_tokens, num_accepted_tokens, prev_positions, num_sampled_prev,
                        num_draft_prev, host_num_computed_tokens);
  call.check_no_overlap();
  if (p.batch > 0) call.template run<correct_num_computed_tokens__op>(p);
}

template <class F>
void compute_slot_mapping_(In<F> query_start_loc, In<F> positions, In<F> block_table, In<F> slot_mapping,
                           Optional<F> row_indices, int64_t block_size, int64_t blocks_per_kv_block, int64_t cp_world,
                           int64_t cp_rank, int64_t cp_interleave, int64_t pad_id) {
  F call("compute_slot_mapping_");
  const TensorView starts = call.view("query_start_loc", query_start_loc);
  const TensorView positions_view = call.view("positions", positions);
  call.check_query_start_loc(starts);
  call.check_vector(positions_view, {DType::kInt64}, kAnySize);
  auto p = check_slots(call, starts.sizes[0] - 1, starts, positions_view, block_table, row_indices, slot_mapping,
                       {block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave}, pad_id);
  call.check_no_overlap();
  if (p.num_slots > 0) call.template run<compute_slot_mapping__op>(p);
}

template <class F>
void correct_spec_state_(In<F> num_computed_tokens, In<F> num_accepted_tokens, In<F> positions, In<F> seq_lens,
                         In<F> slot_mapping, Optional<F> discard, In<F> prev_positions, In<F> num_sampled_prev,
                         In<F> num_draft_prev, In<F> host_num_computed_tokens, In<F> query_start_loc,
                         Optional<F> num_tokens, In<F> block_table, Optional<F> row_indices, int64_t block_size,
                         int64_t blocks_per_kv_block, int64_t cp_world, int64_t cp_rank, int64_t cp_interleave,
                         int64_t pad_id, Optional<F> workspace) {
  F call("correct_spec_state_");
  CorrectSpecStateParams p{};
  p.counts = check_counts(call, num_computed_tokens, num_accepted_tokens, prev_positions, num_sampled_prev,
                          num_draft_prev, host_num_computed_tokens);
  const int64_t batch = p.counts.batch;
  const TensorView starts = call.view("query_start_loc", query_start_loc);
  const TensorView positions_view = call.view("positions", positions);
  call.check_int32s(starts, batch + 1);
  call.check_vector(positions_view, {DType::kInt64}, -1, Arguments::kWrite);
  p.positions = static_cast<int64_t*>(positions_view.data);
  p.slots = check_slots(call, batch, starts, positions_view, block_table, row_indices, slot_mapping,
                        {block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave}, pad_id);
  const TensorView lengths = call.view("seq_lens", seq_lens);
  p.seq_lens = call.template check_output_vector<int32_t>(lengths, DType::kInt32, batch, kSizeOfPrevPositions);
  p.num_seq_lens = lengths.sizes[0];
  const auto tokens = call.view("num_tokens", num_tokens);
  if (tokens) {
    p.num_tokens = call.check_int32s(*tokens, kAnySize);
    p.num_rows = tokens->sizes[0];
  }
  if (const auto mask = call.view("discard", discard)) {
    p.discard = call.template check_output_vector<uint8_t>(*mask, DType::kBool, batch, kSizeOfPrevPositions);
    if (!tokens) call.fail("num_tokens", "a tensor (discard is given)", "None");
    if (p.slots.row_indices.bytes == 0) {
      call.check_at_most("prev_positions", "batch", batch, p.num_rows,
                         "size of num_tokens, because row_indices is None");
    }
  }
  const auto workspace_view = call.view("workspace", workspace);
  if (workspace_view) call.check_output_int32s(*workspace_view, kAnySize);
  call.check_no_overlap();
  if (batch > 0 || p.slots.num_slots > 0 || p.num_seq_lens > 0) {
    const auto allocation = call.template workspace<correct_spec_state__op>(p, workspace_view);
    p.workspace = allocation.data();
    call.template run<correct_spec_state__op>(p);
  }
}

}  // namespace ngram_npu::api
