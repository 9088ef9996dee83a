// The API: every operator's schema, with the checks of its arguments and the members of its kernel's parameters that
// get them. torch (api/torch) and numpy (api/numpy) interpret the same table (api/operator.h explains its words).
// docs/ops contains the operators' contracts.
//
// Arguments after `*` are keyword-only in torch. The numpy functions have the same names and defaults, and also accept
// all arguments by position. `(a!)` marks a tensor that the operator writes.
#pragma once

#include "api/operator.h"
#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "core/merging.h"
#include "core/store.h"

// NGRAM_NPU_OPERATORS(X) calls X(op, kernel) for each operator.
#define NGRAM_NPU_OPERATORS(X)                                  \
  X(ngram_propose, ngram_propose)                               \
  X(ngram_propose_, ngram_propose)                              \
  X(ngram_step_, ngram_step_)                                   \
  X(store_append_, store_append_)                               \
  X(store_propose_, store_propose_)                             \
  X(merge_drafts_, merge_drafts_)                               \
  X(prepare_next_token_ids, prepare_next_token_ids)             \
  X(prepare_inputs_padded, prepare_inputs_padded)               \
  X(prepare_inputs, prepare_inputs)                             \
  X(prepare_input_ids_, prepare_input_ids_)                     \
  X(correct_num_computed_tokens_, correct_num_computed_tokens_) \
  X(compute_slot_mapping_, compute_slot_mapping_)               \
  X(correct_spec_state_, correct_spec_state_)

namespace ngram_npu::schemas {

using namespace api;  // NOLINT: the words of the tables

#define FIELD NGRAM_NPU_FIELD

// What the lookups have in common.
template <class LookupParams>
struct LookupTable : OperatorTable<LookupParams> {
  using Params = LookupParams;
  static constexpr Field kExecutor = FIELD(executor), kWorkspace = FIELD(workspace);
  static bool complete(const Call& call, Params& p);
};

struct ngram_propose : LookupTable<NgramProposeParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor token_ids", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor num_tokens", kInt32, {R}, FIELD(num_tokens)},
      {"*"},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"Tensor? num_sampled=None", kInt32, {B}, FIELD(num_sampled)},
      {"SymInt min_n", FIELD(lookup.min_n)},
      {"SymInt max_n", {1, kMaxNgram}, FIELD(lookup.max_n)},
      {"SymInt k", k},
      {"int match_policy=0", {kEarliest, kLatest}, FIELD(lookup.match_policy)},
      {"bool overlap=False", FIELD(lookup.overlap)},
      {"SymInt max_len=9223372036854775807", FIELD(lookup.max_len)},
      {"SymInt vocab_size=2147483647", FIELD(lookup.vocab_size)},
      {"bool fill=False", FIELD(lookup.fill)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {k, {0, kMaxDraftTokens}, FIELD(lookup.k)}};
  static constexpr Result kResults[] = {
      {"draft_token_ids", {B, k}, FIELD(draft_token_ids)},
      {"num_draft_tokens", {B}, FIELD(num_draft_tokens)},
      {"match_len", {B}, FIELD(match_len)},
  };
};

struct ngram_propose_ : LookupTable<NgramProposeParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor token_ids", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor num_tokens", kInt32, {R}, FIELD(num_tokens)},
      {"*"},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"Tensor? num_sampled=None", kInt32, {B}, FIELD(num_sampled)},
      {"SymInt min_n", FIELD(lookup.min_n)},
      {"SymInt max_n", {1, kMaxNgram}, FIELD(lookup.max_n)},
      {"int match_policy=0", {kEarliest, kLatest}, FIELD(lookup.match_policy)},
      {"bool overlap=False", FIELD(lookup.overlap)},
      {"SymInt max_len=9223372036854775807", FIELD(lookup.max_len)},
      {"SymInt vocab_size=2147483647", FIELD(lookup.vocab_size)},
      {"bool fill=False", FIELD(lookup.fill)},
      {"Tensor(a!) draft_token_ids", kInt32OrInt64, {B, k}, FIELD(draft_token_ids)},
      {"Tensor(b!) num_draft_tokens", kInt32, {B}, FIELD(num_draft_tokens)},
      {"Tensor(c!) match_len", kInt32, {B}, FIELD(match_len)},
      {"Tensor(w!)? workspace=None", kInt32, {W}, {}},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {k, {0, kMaxDraftTokens}, FIELD(lookup.k)}};
  static int64_t count_workspace_words(int64_t batch) { return lookup_workspace_words(batch); }
};

struct ngram_step_ : LookupTable<NgramStepParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor(a!) token_ids", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor(b!) num_tokens", kInt32, {R}, FIELD(num_tokens)},
      {"Tensor sampled_token_ids", kInt32, {B, M}, FIELD(sampled_token_ids)},
      {"*"},
      {"Tensor? discard=None", kBool, {B}, FIELD(discard)},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"bool advance=True", FIELD(advance)},
      {"SymInt vocab_size=2147483647", FIELD(lookup.vocab_size)},
      {"SymInt min_n", FIELD(lookup.min_n)},
      {"SymInt max_n", {1, kMaxNgram}, FIELD(lookup.max_n)},
      {"SymInt k", k},
      {"int match_policy=0", {kEarliest, kLatest}, FIELD(lookup.match_policy)},
      {"bool overlap=False", FIELD(lookup.overlap)},
      {"SymInt max_len=9223372036854775807", FIELD(lookup.max_len)},
      {"bool fill=False", FIELD(lookup.fill)},
      {"Tensor(w!)? workspace=None", kInt32, {W}, {}},
  };
  static constexpr Size kSizes[] = {
      {B, FIELD(batch)}, {M, {1, kMaxSampledWidth}}, {k, {0, kMaxDraftTokens}, FIELD(lookup.k)}};
  static constexpr Result kResults[] = {
      {"next_token_ids", {B}, FIELD(next_token_ids)},
      {"num_sampled", {B}, FIELD(num_sampled)},
      {"draft_token_ids", {B, k}, FIELD(draft_token_ids)},
      {"num_draft_tokens", {B}, FIELD(num_draft_tokens)},
      {"match_len", {B}, FIELD(match_len)},
  };
  static int64_t count_workspace_words(int64_t batch) { return lookup_workspace_words(batch); }
};

struct store_append_ : OperatorTable<StoreAppendParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor token_ids", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor num_tokens", kInt32, {R}, FIELD(num_tokens)},
      {"Tensor num_sampled", kInt32, {B}, FIELD(num_sampled)},
      {"*"},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"Tensor? slot_indices=None", kInt32OrInt64, {B}, FIELD(slot_indices)},
      {"Tensor? scopes=None", kInt32OrInt64, {B}, FIELD(scopes)},
      {"Tensor(a!) slots", kInt32, {G, store::kSlotWords}, FIELD(slots)},
      {"Tensor(b!) text", kInt32, {N, store::kBlockTokens}, FIELD(contents.text)},
      {"Tensor(c!) blocks", kInt32, {N, store::kHeadWords}, FIELD(contents.blocks)},
      {"Tensor(d!) table", kInt32, {store::kSizes, E}, FIELD(contents.table)},
      {"Tensor(e!) allocator", kInt32, {store::kAllocatorWords}, FIELD(allocator)},
      {"SymInt max_new", {1, INT32_MAX}, FIELD(max_new)},
      {"bool hold_back=True", FIELD(hold_back)},
      {"Tensor(w!)? workspace=None", kInt32, {W}, {}},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {N, {2, store::kMaxBlocks}}};
  static constexpr Field kWorkspace = FIELD(workspace);
  static int64_t count_workspace_words(int64_t batch) { return store_append_workspace_words(batch); }
  static bool complete(const Call& call, Params& p);
};

struct store_propose_ : OperatorTable<StoreProposeParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor token_ids", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor num_tokens", kInt32, {R}, FIELD(num_tokens)},
      {"Tensor num_sampled", kInt32, {B}, FIELD(num_sampled)},
      {"*"},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"Tensor? scopes=None", kInt32OrInt64, {B}, FIELD(scopes)},
      {"Tensor text", kInt32, {N, store::kBlockTokens}, FIELD(contents.text)},
      {"Tensor blocks", kInt32, {N, store::kHeadWords}, FIELD(contents.blocks)},
      {"Tensor table", kInt32, {store::kSizes, E}, FIELD(contents.table)},
      {"Tensor(a!) draft_token_ids", kInt32OrInt64, {B, k}, FIELD(draft_token_ids)},
      {"Tensor(b!) num_draft_tokens", kInt32, {B}, FIELD(num_draft_tokens)},
      {"Tensor(c!) match_len", kInt32, {B}, FIELD(match_len)},
      {"Tensor(d!) agreement", kInt32, {B}, FIELD(agreement)},
      {"SymInt max_len=9223372036854775807", FIELD(max_len)},
      {"SymInt vocab_size=2147483647", FIELD(vocab_size)},
      {"bool fill=False", FIELD(fill)},
  };
  static constexpr Size kSizes[] = {
      {B, FIELD(batch)}, {N, {2, store::kMaxBlocks}}, {k, {0, kMaxDraftTokens}, FIELD(k)}};
  static bool complete(const Call& call, Params& p);
};

struct merge_drafts_ : OperatorTable<MergeDraftsParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor neural_draft_token_ids", kInt32OrInt64, {B, W}, FIELD(neural_draft_token_ids)},
      {"Tensor ngram_draft_token_ids", kInt32, {B, k}, FIELD(ngram_draft_token_ids)},
      {"Tensor num_ngram_draft_tokens", kInt32, {B}, FIELD(num_ngram_draft_tokens)},
      {"Tensor match_len", kInt32, {B}, FIELD(match_len)},
      {"*"},
      {"Tensor? num_neural_draft_tokens=None", kInt32, {B}, FIELD(num_neural_draft_tokens)},
      {"Tensor? draft_costs=None", kUInt8, {B, k}, FIELD(draft_costs)},
      {"Tensor? neural_draft_costs=None", kUInt8, {B, W}, FIELD(neural_draft_costs)},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"Tensor? num_sampled=None", kInt32, {B}, FIELD(num_sampled)},
      {"Tensor? num_scheduled_drafts=None", kInt32, {B}, FIELD(num_scheduled_drafts)},
      {"Tensor(a!)? neural_acceptance=None", kInt32, {R, kAcceptanceColumns}, FIELD(neural_acceptance)},
      {"SymInt min_match_len=1", {0, INT32_MAX}, FIELD(min_match_len)},
      {"SymInt threshold=0", {0, INT32_MAX}, FIELD(threshold)},
      {"bool extend=False", FIELD(extend)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {W, FIELD(neural_width)}, {k, {0, kMaxDraftTokens}}};
  static constexpr Result kResults[] = {
      {"draft_token_ids", {B, k}, FIELD(draft_token_ids), "neural_draft_token_ids"},
      {"num_draft_tokens", {B}, FIELD(num_draft_tokens)},
      {"draft_source", {B}, FIELD(draft_source)},
  };
  static bool complete(const Call& call, Params& p);
};

struct prepare_next_token_ids : OperatorTable<PrepareNextTokenIdsParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor sampled_token_ids", kInt32, {B, M}, FIELD(sampled_token_ids)},
      {"*"},
      {"Tensor? discard=None", kBool, {B}, FIELD(discard)},
      {"Tensor? backup_token_ids=None", kInt32, {B}, FIELD(backup_token_ids)},
      {"Tensor? token_ids=None", kInt32, {R, S}, FIELD(token_ids)},
      {"Tensor? num_tokens=None", kInt32, {R}, FIELD(num_tokens)},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"SymInt vocab_size=2147483647", FIELD(vocab_size)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {M, {1, kMaxSampledWidth}}};
  static constexpr Result kResults[] = {
      {"next_token_ids", {B}, FIELD(next_token_ids)},
      {"num_sampled", {B}, FIELD(num_sampled)},
  };
  static bool complete(const Call& call, Params& p);
};

struct prepare_inputs_padded : OperatorTable<PrepareInputsPaddedParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor cu_num_draft_tokens", kInt32, {B}, FIELD(cu_num_draft_tokens)},
      {"Tensor num_sampled", kInt32, {B}, FIELD(num_sampled)},
      {"Tensor query_start_loc", kInt32, {B + 1}, FIELD(query_start_loc)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}};
  static constexpr Result kResults[] = {
      {"token_indices_to_sample", {B}, FIELD(token_indices_to_sample)},
      {"num_rejected", {B}, FIELD(num_rejected)},
  };
};

struct prepare_inputs : OperatorTable<PrepareInputsParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor query_start_loc", kInt32, {B + 1}, FIELD(query_start_loc)},
      {"Tensor seq_lens", kInt32, {B}, FIELD(seq_lens)},
      {"Tensor num_rejected", kInt32, {B}, FIELD(num_rejected)},
      {"*"},
      {"SymInt total_tokens", T},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {T, {0, INT32_MAX}, FIELD(total_tokens)}};
  static constexpr Result kResults[] = {
      {"query_start_loc_out", {B + 1}, FIELD(query_start_loc_out)},
      {"seq_lens_out", {B}, FIELD(seq_lens_out)},
      {"token_indices", {T}, FIELD(token_indices)},
  };
  static bool complete(const Call& call, Params& p);
};

struct prepare_input_ids_ : OperatorTable<PrepareInputIdsParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor(a!) input_ids", kInt32, {N}, FIELD(input_ids)},
      {"*"},
      {"Tensor query_start_loc", kInt32, {B + 1}, FIELD(query_start_loc)},
      {"Tensor prev_positions", kInt32OrInt64, {B}, FIELD(prev_positions)},
      {"Tensor next_token_ids", kInt32, {Q}, FIELD(next_token_ids)},
      {"Tensor draft_token_ids", kInt32, {Q, k}, FIELD(draft_token_ids)},
      {"Tensor num_scheduled_drafts", kInt32, {B}, FIELD(num_scheduled_drafts)},
      {"int pad_token=0", {INT32_MIN, INT32_MAX}, FIELD(pad_token)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {N, FIELD(num_inputs)}};
  static bool complete(const Call& call, Params& p);
};

struct correct_num_computed_tokens_ : OperatorTable<CorrectNumComputedTokensParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor(a!) num_computed_tokens", kInt32, {C >= B}, FIELD(num_computed_tokens)},
      {"Tensor(b!) num_accepted_tokens", kInt32, {D >= B}, FIELD(num_accepted_tokens)},
      {"*"},
      {"Tensor prev_positions", kInt32OrInt64, {B}, FIELD(prev_positions)},
      {"Tensor num_sampled_prev", kInt32, {P}, FIELD(num_sampled_prev)},
      {"Tensor num_draft_prev", kInt32, {Q}, FIELD(num_draft_prev)},
      {"Tensor host_num_computed_tokens", kInt32, {B}, FIELD(host_num_computed_tokens)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}};
  static bool complete(const Call& call, Params& p);
};

struct compute_slot_mapping_ : OperatorTable<ComputeSlotMappingParams> {
  static constexpr Argument kArguments[] = {
      {"Tensor query_start_loc", kInt32, {B + 1}, FIELD(query_start_loc)},
      {"Tensor positions", kInt64, {T}, FIELD(positions)},
      {"Tensor block_table", kInt32, {R, N}, FIELD(block_table)},
      {"Tensor(a!) slot_mapping", kInt32OrInt64, {M}, FIELD(slot_mapping)},
      {"*"},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(row_indices)},
      {"SymInt block_size", {1, INT32_MAX}, FIELD(layout.block_size)},
      {"SymInt blocks_per_kv_block=1", FIELD(layout.blocks_per_kv_block)},
      {"SymInt cp_world=1", FIELD(layout.cp_world)},
      {"SymInt cp_rank=0", FIELD(layout.cp_rank)},
      {"SymInt cp_interleave=1", FIELD(layout.cp_interleave)},
      {"int pad_id=-1", FIELD(pad_id)},
  };
  static constexpr Size kSizes[] = {{B, FIELD(batch)}, {T, FIELD(num_positions)}, {M, FIELD(num_slots)}};
  static bool complete(const Call& call, Params& p);
};

struct correct_spec_state_ : OperatorTable<CorrectSpecStateParams> {
  static constexpr Argument kArguments[] = {
      {"*"},
      {"Tensor(a!) num_computed_tokens", kInt32, {C >= B}, FIELD(counts.num_computed_tokens)},
      {"Tensor(b!) num_accepted_tokens", kInt32, {D >= B}, FIELD(counts.num_accepted_tokens)},
      {"Tensor(c!) positions", kInt64, {T}, FIELD(positions)},
      {"Tensor(d!) seq_lens", kInt32, {L >= B}, FIELD(seq_lens)},
      {"Tensor(e!) slot_mapping", kInt32OrInt64, {M}, FIELD(slots.slot_mapping)},
      {"Tensor(f!)? discard=None", kBool, {E >= B}, FIELD(discard)},
      {"Tensor prev_positions", kInt32OrInt64, {B}, FIELD(counts.prev_positions)},
      {"Tensor num_sampled_prev", kInt32, {P}, FIELD(counts.num_sampled_prev)},
      {"Tensor num_draft_prev", kInt32, {Q}, FIELD(counts.num_draft_prev)},
      {"Tensor host_num_computed_tokens", kInt32, {B}, FIELD(counts.host_num_computed_tokens)},
      {"Tensor query_start_loc", kInt32, {B + 1}, FIELD(slots.query_start_loc)},
      {"Tensor? num_tokens=None", kInt32, {S}, FIELD(num_tokens)},
      {"Tensor block_table", kInt32, {R, N}, FIELD(slots.block_table)},
      {"Tensor? row_indices=None", kInt32OrInt64, {one_of(R)}, FIELD(slots.row_indices)},
      {"SymInt block_size", {1, INT32_MAX}, FIELD(slots.layout.block_size)},
      {"SymInt blocks_per_kv_block=1", FIELD(slots.layout.blocks_per_kv_block)},
      {"SymInt cp_world=1", FIELD(slots.layout.cp_world)},
      {"SymInt cp_rank=0", FIELD(slots.layout.cp_rank)},
      {"SymInt cp_interleave=1", FIELD(slots.layout.cp_interleave)},
      {"int pad_id=-1", FIELD(slots.pad_id)},
      {"Tensor(w!)? workspace=None", kInt32, {W}, {}},
  };
  static constexpr Size kSizes[] = {
      {B, FIELD(counts.batch)}, {T, FIELD(slots.num_positions)}, {M, FIELD(slots.num_slots)}, {L, FIELD(num_seq_lens)},
      {S, FIELD(num_rows)},
  };
  static constexpr Field kWorkspace = FIELD(workspace);
  static int64_t count_workspace_words(int64_t) { return kCorrectSpecStateWorkspaceWords; }
  static bool complete(const Call& call, Params& p);
};

#undef FIELD

}  // namespace ngram_npu::schemas
