#include "host/correct_spec_state_.h"

#include "torch/workspace.h"

namespace ngram_npu::torch_side {
namespace {

Operator op("correct_spec_state_");

void correct_spec_state_(const Tensor& num_computed_tokens, const Tensor& num_accepted_tokens, const Tensor& positions,
                         const Tensor& seq_lens, const Tensor& slot_mapping, const std::optional<Tensor>& discard,
                         const Tensor& prev_positions, const Tensor& num_sampled_prev, const Tensor& num_draft_prev,
                         const Tensor& host_num_computed_tokens, const Tensor& query_start_loc,
                         const std::optional<Tensor>& num_tokens, const Tensor& block_table,
                         const std::optional<Tensor>& row_indices, int64_t block_size, int64_t blocks_per_kv_block,
                         int64_t cp_world, int64_t cp_rank, int64_t cp_interleave, int64_t pad_id,
                         const std::optional<Tensor>& workspace) {
  const host::TensorView first = view_of(num_computed_tokens);
  const OptionalView workspace_view(workspace);
  CorrectSpecStateParams p = host::check_correct_spec_state_(
      first, view_of(num_accepted_tokens), view_of(positions), view_of(seq_lens), view_of(slot_mapping),
      OptionalView(discard).get(), view_of(prev_positions), view_of(num_sampled_prev), view_of(num_draft_prev),
      view_of(host_num_computed_tokens), view_of(query_start_loc), OptionalView(num_tokens).get(), view_of(block_table),
      OptionalView(row_indices).get(), block_size, blocks_per_kv_block, cp_world, cp_rank, cp_interleave, pad_id,
      workspace_view.get());
  if (p.counts.batch > 0 || p.slots.num_slots > 0 || p.num_seq_lens > 0) {
    const Workspace memory(op, first.device, &p, workspace_view.get(), num_computed_tokens);
    p.workspace = memory.data();
    op.call(first.device, &p);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(ngram_npu, m) {
  m.def(
      "correct_spec_state_(Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, Tensor(c!) positions, "
      "Tensor(d!) seq_lens, Tensor(e!) slot_mapping, Tensor(f!)? discard, Tensor prev_positions, "
      "Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens, Tensor query_start_loc, "
      "Tensor? num_tokens, Tensor block_table, Tensor? row_indices, SymInt block_size, SymInt blocks_per_kv_block, "
      "SymInt cp_world, SymInt cp_rank, SymInt cp_interleave, int pad_id, Tensor(w!)? workspace) -> ()");
}

NGRAM_NPU_IMPL(correct_spec_state_)

}  // namespace
}  // namespace ngram_npu::torch_side
