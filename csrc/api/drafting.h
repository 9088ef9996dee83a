// The operators that look up n-grams in a row or in an index, and the operators that update an index.
#pragma once

#include "api/arguments.h"
#include "core/drafting.h"
#include "cpu/index_policy.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(ngram_propose, NgramProposeParams)
NGRAM_NPU_OPERATOR(ngram_step_, NgramStepParams)
NGRAM_NPU_OPERATOR(ngram_index_propose_, NgramIndexProposeParams)
NGRAM_NPU_OPERATOR(ngram_index_step_, NgramIndexStepParams)
NGRAM_NPU_OPERATOR(ngram_index_append_, NgramIndexAppendParams)
NGRAM_NPU_OPERATOR(ngram_index_reset_, NgramIndexResetParams)

// The outputs of every lookup.
template <class F>
struct DraftOutputs {
  typename F::Output draft_token_ids, num_draft_tokens, match_len;

  template <class Params>
  DraftOutputs(const F& call, Params& p)
      : draft_token_ids(call.empty(p.batch, p.lookup.k)),
        num_draft_tokens(call.empty(p.batch)),
        match_len(call.empty(p.batch)) {
    p.draft_token_ids = {call.data(draft_token_ids), p.lookup.k, sizeof(int32_t)};
    p.num_draft_tokens = call.data(num_draft_tokens);
    p.match_len = call.data(match_len);
  }
};

// Checks the rows, their lengths and the row indices. The batch is the number of row indices; without row indices, it
// is the number of rows.
template <class F, class Params>
void check_rows(F& call, Params& p, In<F> token_ids, In<F> num_tokens, Optional<F> row_indices) {
  p.token_ids = call.template check_token_rows<const int32_t>(call.view("token_ids", token_ids));
  p.num_tokens = call.check_int32s(call.view("num_tokens", num_tokens), p.token_ids.rows);
  const auto rows = call.view("row_indices", row_indices);
  p.row_indices = call.check_indices(rows, kAnySize);
  p.batch = rows ? rows->sizes[0] : p.token_ids.rows;
}

constexpr const char* kIndexOnCpu =
    "the index is in host memory; on other devices, call ngram_propose or ngram_step_, which scan";
constexpr const char* kDraftCostsNeedCosts = "draft_costs require costs";
constexpr const char* kDraftCostsNeedMatchCosts = "draft_costs require match_costs";

template <class F>
IndexAccess check_index(F& call, In<F> index, Optional<F> slot_indices, int64_t batch) {
  call.check_on_cpu(kIndexOnCpu);
  const TensorView view = call.view("index", index);
  int32_t* words = call.check_output_int32s(view, kAnySize);
  return {words, view.sizes[0], call.check_indices(call.view("slot_indices", slot_indices), batch)};
}

template <class F>
std::optional<TensorView> check_workspace(F& call, Optional<F> workspace) {
  const auto view = call.view("workspace", workspace);
  if (view) call.check_output_int32s(*view, kAnySize);
  return view;
}

// Calls an operator's kernel. lookup_params is op_params, or the member of op_params that has the lookup's parameters.
template <class Operator, class F, class LookupParams>
void run_lookup(F& call, typename Operator::Params& op_params, LookupParams& lookup_params,
                const std::optional<TensorView>& workspace_view) {
  if (lookup_params.batch == 0) return;
  const Executor executor = F::executor();
  lookup_params.executor = &executor;
  const auto workspace = call.template workspace<Operator>(op_params, workspace_view);
  lookup_params.workspace = workspace.data();
  call.template run<Operator>(op_params);
}

// Checks the arguments that ngram_propose and ngram_index_propose_ share.
template <class F>
NgramProposeParams check_propose(F& call, In<F> token_ids, In<F> num_tokens, Optional<F> row_indices,
                                 Optional<F> num_sampled) {
  NgramProposeParams p{};
  check_rows(call, p, token_ids, num_tokens, row_indices);
  if (const auto counts = call.view("num_sampled", num_sampled)) p.num_sampled = call.check_int32s(*counts, p.batch);
  return p;
}

template <class Operator, class F>
auto run_propose(F& call, typename Operator::Params& op_params, NgramProposeParams& propose_params) {
  DraftOutputs<F> drafts(call, propose_params);
  run_lookup<Operator>(call, op_params, propose_params, {});
  return call.results(drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

template <class F>
auto ngram_propose(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, Optional<F> num_sampled, int64_t min_n,
                   int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                   Optional<F> match_costs, int64_t cost_limit, bool fill) {
  F call("ngram_propose");
  NgramProposeParams p = check_propose(call, token_ids, num_tokens, row_indices, num_sampled);
  p.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
  call.check_scan_costs(&p.lookup, call.view("match_costs", match_costs), cost_limit);
  call.check_no_overlap();
  return run_propose<ngram_propose_op>(call, p, p);
}

template <class F>
void ngram_propose_(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, Optional<F> num_sampled, int64_t min_n,
                    int64_t max_n, int64_t match_policy, bool overlap, int64_t max_len, Optional<F> match_costs,
                    int64_t cost_limit, bool fill, In<F> draft_token_ids, In<F> num_draft_tokens, In<F> match_len,
                    Optional<F> draft_costs, Optional<F> workspace) {
  F call("ngram_propose_");
  NgramProposeParams p = check_propose(call, token_ids, num_tokens, row_indices, num_sampled);
  const TensorView drafts = call.view("draft_token_ids", draft_token_ids);
  p.draft_token_ids = call.check_draft_rows(drafts, p.batch);
  p.lookup = call.check_lookup(min_n, max_n, drafts.sizes[1], match_policy, overlap, max_len, fill);
  call.check_scan_costs(&p.lookup, call.view("match_costs", match_costs), cost_limit);
  p.num_draft_tokens = call.check_output_int32s(call.view("num_draft_tokens", num_draft_tokens), p.batch);
  p.match_len = call.check_output_int32s(call.view("match_len", match_len), p.batch);
  p.draft_costs = call.check_draft_costs(call.view("draft_costs", draft_costs), p.batch, p.lookup.k,
                                         p.lookup.match_costs != nullptr, kDraftCostsNeedMatchCosts);
  const auto workspace_view = check_workspace(call, workspace);
  call.check_no_overlap();
  run_lookup<ngram_propose_op>(call, p, p, workspace_view);
}

template <class F>
auto ngram_index_propose_(In<F> token_ids, In<F> num_tokens, In<F> index, Optional<F> row_indices,
                          Optional<F> slot_indices, Optional<F> num_sampled, int64_t min_n, int64_t max_n, int64_t k,
                          int64_t match_policy, bool overlap, int64_t max_len, bool ladder, Optional<F> costs,
                          int64_t cost_limit, Optional<F> draft_costs, bool fill, Optional<F> token_logits) {
  F call("ngram_index_propose_");
  NgramIndexProposeParams p{};
  p.propose = check_propose(call, token_ids, num_tokens, row_indices, num_sampled);
  p.propose.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
  call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
  p.index = check_index(call, index, slot_indices, p.propose.batch);
  p.catch_up_tokens = cpu::kMaxOperatorCatchUpTokens;
  p.ladder = call.check_ladder(ladder, call.view("costs", costs), cost_limit, call.view("token_logits", token_logits));
  p.propose.draft_costs = call.check_draft_costs(call.view("draft_costs", draft_costs), p.propose.batch, k,
                                                 p.ladder.costs != nullptr, kDraftCostsNeedCosts);
  call.check_no_overlap();
  return run_propose<ngram_index_propose__op>(call, p, p.propose);
}

// Checks the arguments that ngram_step_ and ngram_index_step_ share.
template <class F>
NgramStepParams check_step(F& call, In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                           Optional<F> row_indices, bool advance, int64_t vocab_size) {
  NgramStepParams p{};
  p.token_ids = call.template check_token_rows<int32_t>(call.view("token_ids", token_ids), Arguments::kWrite);
  p.num_tokens = call.check_output_int32s(call.view("num_tokens", num_tokens), p.token_ids.rows);
  p.sampled_token_ids = call.check_sampled_token_ids(call.view("sampled_token_ids", sampled_token_ids));
  p.batch = p.sampled_token_ids.rows;
  p.discard = call.check_mask(call.view("discard", discard), p.batch);
  p.row_indices = call.check_row_indices(call.view("row_indices", row_indices), "sampled_token_ids", p.batch,
                                         p.token_ids.rows, "number of rows of token_ids, because row_indices is None");
  p.advance = advance;
  p.vocab_size = vocab_size;
  return p;
}

template <class Operator, class F>
auto run_step(F& call, typename Operator::Params& op_params, NgramStepParams& step_params,
              const std::optional<TensorView>& workspace_view = {}) {
  auto next_token_ids = call.empty(step_params.batch);
  auto num_sampled = call.empty(step_params.batch);
  DraftOutputs<F> drafts(call, step_params);
  step_params.next_token_ids = call.data(next_token_ids);
  step_params.num_sampled = call.data(num_sampled);
  run_lookup<Operator>(call, op_params, step_params, workspace_view);
  return call.results(next_token_ids, num_sampled, drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

template <class F>
auto ngram_step_(In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                 Optional<F> row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n, int64_t k,
                 int64_t match_policy, bool overlap, int64_t max_len, Optional<F> match_costs, int64_t cost_limit,
                 bool fill, Optional<F> draft_costs, Optional<F> workspace) {
  F call("ngram_step_");
  NgramStepParams p =
      check_step(call, token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size);
  p.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
  call.check_scan_costs(&p.lookup, call.view("match_costs", match_costs), cost_limit);
  p.draft_costs = call.check_draft_costs(call.view("draft_costs", draft_costs), p.batch, k,
                                         p.lookup.match_costs != nullptr, kDraftCostsNeedMatchCosts);
  const auto workspace_view = check_workspace(call, workspace);
  call.check_no_overlap();
  return run_step<ngram_step__op>(call, p, p, workspace_view);
}

template <class F>
auto ngram_index_step_(In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, In<F> index, Optional<F> discard,
                       Optional<F> row_indices, Optional<F> slot_indices, bool advance, int64_t vocab_size,
                       int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                       bool ladder, Optional<F> costs, int64_t cost_limit, Optional<F> draft_costs, bool fill,
                       Optional<F> token_logits) {
  F call("ngram_index_step_");
  NgramIndexStepParams p{};
  p.step = check_step(call, token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size);
  p.step.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
  call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
  p.index = check_index(call, index, slot_indices, p.step.batch);
  p.catch_up_tokens = cpu::kMaxOperatorCatchUpTokens;
  p.ladder = call.check_ladder(ladder, call.view("costs", costs), cost_limit, call.view("token_logits", token_logits));
  p.step.draft_costs = call.check_draft_costs(call.view("draft_costs", draft_costs), p.step.batch, k,
                                              p.ladder.costs != nullptr, kDraftCostsNeedCosts);
  call.check_no_overlap();
  return run_step<ngram_index_step__op>(call, p, p.step);
}

template <class F>
void ngram_index_append_(In<F> token_ids, In<F> num_tokens, In<F> index, Optional<F> row_indices,
                         Optional<F> slot_indices, int64_t min_n, int64_t max_n, int64_t match_policy, bool ladder,
                         bool outcomes) {
  F call("ngram_index_append_");
  NgramIndexAppendParams p{};
  check_rows(call, p, token_ids, num_tokens, row_indices);
  call.check_ngram_range(min_n, max_n, match_policy);
  call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
  if (outcomes && !ladder) call.fail("outcomes", "False (outcomes require ladder=True)", "True");
  p.index = check_index(call, index, slot_indices, p.batch);
  p.ladder = ladder;
  p.outcomes = outcomes;
  p.min_n = min_n;
  p.max_n = max_n;
  p.match_policy = static_cast<int32_t>(match_policy);
  call.check_no_overlap();
  if (p.batch == 0) return;
  const Executor executor = F::executor();
  p.executor = &executor;
  call.template run<ngram_index_append__op>(p);
}

template <class F>
void ngram_index_reset_(In<F> index, In<F> slot_indices) {
  F call("ngram_index_reset_");
  NgramIndexResetParams p{};
  const TensorView words = call.view("index", index);
  p.index.words = call.check_output_int32s(words, kAnySize);
  call.check_on_cpu(kIndexOnCpu);
  p.index.num_words = words.sizes[0];
  const TensorView slots = call.view("slot_indices", slot_indices);
  p.index.slot_indices = call.check_indices(slots, kAnySize);
  p.count = slots.sizes[0];
  call.check_no_overlap();
  if (p.count > 0) call.template run<ngram_index_reset__op>(p);
}

}  // namespace ngram_npu::api
