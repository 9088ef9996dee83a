#include "host/correct_spec_state_.h"

#include "host/compute_slot_mapping_.h"
#include "host/correct_num_computed_tokens_.h"

namespace ngram_npu::host {

CorrectSpecStateParams check_correct_spec_state_(
    const TensorView& num_computed_tokens, const TensorView& num_accepted_tokens, const TensorView& positions,
    const TensorView& seq_lens, const TensorView& slot_mapping, const TensorView* discard,
    const TensorView& prev_positions, const TensorView& num_sampled_prev, const TensorView& num_draft_prev,
    const TensorView& host_num_computed_tokens, const TensorView& query_start_loc, const TensorView* num_tokens,
    const TensorView& block_table, const TensorView* row_indices, int64_t block_size, int64_t blocks_per_kv_block,
    int64_t cp_world, int64_t cp_rank, int64_t cp_interleave, int64_t pad_id, const TensorView* workspace) {
  Arguments arguments("correct_spec_state_");
  CorrectSpecStateParams p{};
  p.counts = check_counts(arguments, num_computed_tokens, num_accepted_tokens, prev_positions, num_sampled_prev,
                          num_draft_prev, host_num_computed_tokens);
  const int64_t batch = p.counts.batch;
  const SlotLayout layout{block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave};
  p.slots = check_slots(arguments, query_start_loc, batch, positions, Arguments::kWrite, block_table, row_indices,
                        slot_mapping, layout, pad_id);
  p.positions = static_cast<int64_t*>(positions.data);
  arguments.vector_of_at_least("seq_lens", seq_lens, {DType::kInt32}, batch, "size of prev_positions",
                               Arguments::kWrite);
  p.seq_lens = static_cast<int32_t*>(seq_lens.data);
  p.num_seq_lens = seq_lens.sizes[0];
  if (num_tokens != nullptr) {
    p.num_tokens = arguments.int32s("num_tokens", *num_tokens, -1);
    p.num_rows = num_tokens->sizes[0];
  }
  if (discard != nullptr) {
    arguments.vector_of_at_least("discard", *discard, {DType::kBool}, batch, "size of prev_positions",
                                 Arguments::kWrite);
    p.discard = static_cast<uint8_t*>(discard->data);
    if (num_tokens == nullptr) arguments.fail("num_tokens", "a tensor (discard is given)", "None");
    if (row_indices == nullptr) {
      arguments.at_most("prev_positions", "batch", batch, p.num_rows, "size of num_tokens, without row_indices");
    }
  }
  if (workspace != nullptr) {
    arguments.vector("workspace", *workspace, {DType::kInt32}, -1, Arguments::kWrite);
    p.workspace = workspace->data;
  }
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
