// The API: every operator's schema, and its body (csrc/host) for each device. Contracts: docs/ops.
#include "host/bookkeeping.h"
#include "host/correction.h"
#include "host/drafting.h"
#include "torch/front_end.h"

namespace ngram_npu::torch_side {
namespace {

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  m.def(
      "ngram_propose(Tensor token_ids, Tensor num_tokens, Tensor? row_indices, Tensor? active, SymInt min_n, "
      "SymInt max_n, SymInt k, int match_policy, bool overlap, SymInt max_len) -> (Tensor draft_token_ids, "
      "Tensor num_draft_tokens, Tensor match_len)");
  m.def(
      "ngram_step_(Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor sampled_token_ids, Tensor? discard, "
      "Tensor? row_indices, bool advance, SymInt vocab_size, SymInt min_n, SymInt max_n, SymInt k, int match_policy, "
      "bool overlap, SymInt max_len, Tensor(w!)? workspace) -> (Tensor next_token_ids, Tensor num_sampled, "
      "Tensor draft_token_ids, Tensor num_draft_tokens, Tensor match_len)");
  m.def(
      "ngram_index_step_(Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor sampled_token_ids, Tensor? discard, "
      "Tensor? row_indices, bool advance, SymInt vocab_size, SymInt min_n, SymInt max_n, SymInt k, int match_policy, "
      "bool overlap, SymInt max_len, Tensor(c!) index, Tensor? slot_indices, Tensor(w!)? workspace) -> "
      "(Tensor next_token_ids, Tensor num_sampled, Tensor draft_token_ids, Tensor num_draft_tokens, "
      "Tensor match_len)");
  m.def(
      "ngram_index_append_(Tensor token_ids, Tensor num_tokens, Tensor? row_indices, Tensor(a!) index, "
      "Tensor? slot_indices, SymInt min_n, SymInt max_n, int match_policy) -> ()");
  m.def("ngram_index_reset_(Tensor(a!) index, Tensor slot_indices) -> ()");
  m.def(
      "prepare_next_token_ids(Tensor sampled_token_ids, Tensor? discard, Tensor? backup_token_ids, Tensor? token_ids, "
      "Tensor? num_tokens, Tensor? row_indices, SymInt vocab_size) -> (Tensor next_token_ids, Tensor num_sampled)");
  m.def(
      "prepare_inputs_padded(Tensor cu_num_draft_tokens, Tensor num_sampled, Tensor query_start_loc) -> "
      "(Tensor token_indices_to_sample, Tensor num_rejected)");
  m.def(
      "prepare_inputs(Tensor query_start_loc, Tensor seq_lens, Tensor num_rejected, SymInt total_tokens) -> "
      "(Tensor query_start_loc_out, Tensor seq_lens_out, Tensor token_indices)");
  m.def(
      "prepare_input_ids_(Tensor(a!) input_ids, Tensor query_start_loc, Tensor prev_positions, Tensor next_token_ids, "
      "Tensor draft_token_ids, Tensor num_scheduled_drafts, int pad_token) -> ()");
  m.def(
      "correct_num_computed_tokens_(Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, "
      "Tensor prev_positions, Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens) -> ()");
  m.def(
      "compute_slot_mapping_(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor? row_indices, "
      "Tensor(a!) slot_mapping, SymInt block_size, SymInt blocks_per_kv_block, SymInt cp_world, SymInt cp_rank, "
      "SymInt cp_interleave, int pad_id) -> ()");
  m.def(
      "correct_spec_state_(Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, Tensor(c!) positions, "
      "Tensor(d!) seq_lens, Tensor(e!) slot_mapping, Tensor(f!)? discard, Tensor prev_positions, "
      "Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens, Tensor query_start_loc, "
      "Tensor? num_tokens, Tensor block_table, Tensor? row_indices, SymInt block_size, SymInt blocks_per_kv_block, "
      "SymInt cp_world, SymInt cp_rank, SymInt cp_interleave, int pad_id, Tensor(w!)? workspace) -> ()");
}

// One body serves every device; the backends' table (backends.h) knows the kernels.
#define NGRAM_NPU_IMPL(op) m.impl(#op, TORCH_BOX(&host::op<TorchCall>));
#define NGRAM_NPU_IMPLS                        \
  NGRAM_NPU_IMPL(ngram_propose)                \
  NGRAM_NPU_IMPL(ngram_step_)                  \
  NGRAM_NPU_IMPL(ngram_index_step_)            \
  NGRAM_NPU_IMPL(ngram_index_append_)          \
  NGRAM_NPU_IMPL(ngram_index_reset_)           \
  NGRAM_NPU_IMPL(prepare_next_token_ids)       \
  NGRAM_NPU_IMPL(prepare_inputs_padded)        \
  NGRAM_NPU_IMPL(prepare_inputs)               \
  NGRAM_NPU_IMPL(prepare_input_ids_)           \
  NGRAM_NPU_IMPL(correct_num_computed_tokens_) \
  NGRAM_NPU_IMPL(compute_slot_mapping_)        \
  NGRAM_NPU_IMPL(correct_spec_state_)

STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m){NGRAM_NPU_IMPLS} STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CUDA, m){
    NGRAM_NPU_IMPLS} STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) {
  NGRAM_NPU_IMPLS
}

}  // namespace
}  // namespace ngram_npu::torch_side
