// The API: the schema of every operator, which torch (api/torch/library.cpp) and numpy (api/numpy/module.cpp) share.
// docs/ops contains the operators' contracts.
//
// Arguments after `*` are keyword-only in torch. The numpy functions have the same names and defaults, and also accept
// all arguments by position.
#pragma once

// NGRAM_NPU_OPERATORS(X) calls X(op) for each operator. The implementations are in csrc/api.
#define NGRAM_NPU_OPERATORS(X)    \
  X(ngram_propose)                \
  X(ngram_propose_)               \
  X(ngram_step_)                  \
  X(store_append_)                \
  X(store_propose_)               \
  X(merge_drafts_)                \
  X(prepare_next_token_ids)       \
  X(prepare_inputs_padded)        \
  X(prepare_inputs)               \
  X(prepare_input_ids_)           \
  X(correct_num_computed_tokens_) \
  X(compute_slot_mapping_)        \
  X(correct_spec_state_)

namespace ngram_npu {

inline constexpr const char* kSchemas[] = {
    "ngram_propose(Tensor token_ids, Tensor num_tokens, *, Tensor? row_indices=None, Tensor? num_sampled=None, "
    "SymInt min_n, SymInt max_n, SymInt k, int match_policy=0, bool overlap=False, SymInt max_len=9223372036854775807, "
    "SymInt vocab_size=2147483647, bool fill=False) -> "
    "(Tensor draft_token_ids, Tensor num_draft_tokens, Tensor match_len)",

    "ngram_propose_(Tensor token_ids, Tensor num_tokens, *, Tensor? row_indices=None, Tensor? num_sampled=None, "
    "SymInt min_n, SymInt max_n, int match_policy=0, bool overlap=False, SymInt max_len=9223372036854775807, "
    "SymInt vocab_size=2147483647, bool fill=False, Tensor(a!) draft_token_ids, Tensor(b!) num_draft_tokens, "
    "Tensor(c!) match_len, Tensor(w!)? workspace=None) -> ()",

    "ngram_step_(Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor sampled_token_ids, *, Tensor? discard=None, "
    "Tensor? row_indices=None, bool advance=True, SymInt vocab_size=2147483647, SymInt min_n, SymInt max_n, SymInt k, "
    "int match_policy=0, bool overlap=False, SymInt max_len=9223372036854775807, bool fill=False, "
    "Tensor(w!)? workspace=None) -> "
    "(Tensor next_token_ids, Tensor num_sampled, Tensor draft_token_ids, Tensor num_draft_tokens, Tensor match_len)",

    "store_append_(Tensor token_ids, Tensor num_tokens, Tensor num_sampled, *, Tensor? row_indices=None, "
    "Tensor? slot_indices=None, Tensor? scopes=None, Tensor(a!) slots, Tensor(b!) text, Tensor(c!) blocks, "
    "Tensor(d!) table, Tensor(e!) allocator, SymInt max_new, bool hold_back=True, Tensor(w!)? workspace=None) -> ()",

    "store_propose_(Tensor token_ids, Tensor num_tokens, Tensor num_sampled, *, Tensor? row_indices=None, "
    "Tensor? scopes=None, Tensor text, Tensor blocks, Tensor table, Tensor(a!) draft_token_ids, "
    "Tensor(b!) num_draft_tokens, Tensor(c!) match_len, Tensor(d!) agreement, SymInt max_len=9223372036854775807, "
    "SymInt vocab_size=2147483647, bool fill=False) -> ()",

    "merge_drafts_(Tensor neural_draft_token_ids, Tensor ngram_draft_token_ids, Tensor num_ngram_draft_tokens, "
    "Tensor match_len, *, Tensor? num_neural_draft_tokens=None, Tensor? draft_costs=None, "
    "Tensor? neural_draft_costs=None, Tensor? row_indices=None, Tensor? num_sampled=None, "
    "Tensor? num_scheduled_drafts=None, Tensor(a!)? neural_acceptance=None, SymInt min_match_len=1, "
    "SymInt threshold=0, bool extend=False) -> "
    "(Tensor draft_token_ids, Tensor num_draft_tokens, Tensor draft_source)",

    "prepare_next_token_ids(Tensor sampled_token_ids, *, Tensor? discard=None, Tensor? backup_token_ids=None, "
    "Tensor? token_ids=None, Tensor? num_tokens=None, Tensor? row_indices=None, SymInt vocab_size=2147483647) -> "
    "(Tensor next_token_ids, Tensor num_sampled)",

    "prepare_inputs_padded(Tensor cu_num_draft_tokens, Tensor num_sampled, Tensor query_start_loc) -> "
    "(Tensor token_indices_to_sample, Tensor num_rejected)",

    "prepare_inputs(Tensor query_start_loc, Tensor seq_lens, Tensor num_rejected, *, SymInt total_tokens) -> "
    "(Tensor query_start_loc_out, Tensor seq_lens_out, Tensor token_indices)",

    "prepare_input_ids_(Tensor(a!) input_ids, *, Tensor query_start_loc, Tensor prev_positions, Tensor next_token_ids, "
    "Tensor draft_token_ids, Tensor num_scheduled_drafts, int pad_token=0) -> ()",

    "correct_num_computed_tokens_(Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, *, "
    "Tensor prev_positions, Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens) -> ()",

    "compute_slot_mapping_(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a!) slot_mapping, *, "
    "Tensor? row_indices=None, SymInt block_size, SymInt blocks_per_kv_block=1, SymInt cp_world=1, SymInt cp_rank=0, "
    "SymInt cp_interleave=1, int pad_id=-1) -> ()",

    "correct_spec_state_(*, Tensor(a!) num_computed_tokens, Tensor(b!) num_accepted_tokens, Tensor(c!) positions, "
    "Tensor(d!) seq_lens, Tensor(e!) slot_mapping, Tensor(f!)? discard=None, Tensor prev_positions, "
    "Tensor num_sampled_prev, Tensor num_draft_prev, Tensor host_num_computed_tokens, Tensor query_start_loc, "
    "Tensor? num_tokens=None, Tensor block_table, Tensor? row_indices=None, SymInt block_size, "
    "SymInt blocks_per_kv_block=1, SymInt cp_world=1, SymInt cp_rank=0, SymInt cp_interleave=1, int pad_id=-1, "
    "Tensor(w!)? workspace=None) -> ()",
};

}  // namespace ngram_npu
