// The operators that look up n-grams in rows.
#pragma once

#include "api/arguments.h"
#include "core/drafting.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(ngram_propose, NgramProposeParams)
NGRAM_NPU_OPERATOR(ngram_step_, NgramStepParams)

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

// Calls an operator's kernel. All tensors of the call must have been checked.
template <class Operator, class F>
void run_lookup(F& call, typename Operator::Params& p, const std::optional<TensorView>& workspace_view) {
  if (p.batch == 0) return;
  const Executor executor = F::executor();
  p.executor = &executor;
  const auto workspace = call.template workspace<Operator>(p, workspace_view);
  p.workspace = workspace.data();
  call.template run<Operator>(p);
}

template <class F>
std::optional<TensorView> check_workspace(F& call, Optional<F> workspace) {
  const auto view = call.view("workspace", workspace);
  if (view) call.check_output_int32s(*view, kAnySize);
  return view;
}

// Checks the inputs of ngram_propose. The batch is the number of row indices; without row indices, it is the number of
// rows.
template <class F>
NgramProposeParams check_propose(F& call, In<F> token_ids, In<F> num_tokens, Optional<F> row_indices,
                                 Optional<F> num_sampled) {
  NgramProposeParams p{};
  p.token_ids = call.template check_token_rows<const int32_t>(call.view("token_ids", token_ids));
  p.num_tokens = call.check_int32s(call.view("num_tokens", num_tokens), p.token_ids.rows);
  const auto rows = call.view("row_indices", row_indices);
  p.row_indices = call.check_indices(rows, kAnySize);
  p.batch = rows ? rows->sizes[0] : p.token_ids.rows;
  if (const auto counts = call.view("num_sampled", num_sampled)) p.num_sampled = call.check_int32s(*counts, p.batch);
  return p;
}

template <class F>
auto ngram_propose(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, Optional<F> num_sampled, int64_t min_n,
                   int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len, int64_t vocab_size,
                   bool fill) {
  F call("ngram_propose");
  NgramProposeParams p = check_propose(call, token_ids, num_tokens, row_indices, num_sampled);
  p.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, vocab_size, fill);
  call.check_no_overlap();
  DraftOutputs<F> drafts(call, p);
  run_lookup<ngram_propose_op>(call, p, {});
  return call.results(drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

template <class F>
void ngram_propose_(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, Optional<F> num_sampled, int64_t min_n,
                    int64_t max_n, int64_t match_policy, bool overlap, int64_t max_len, int64_t vocab_size, bool fill,
                    In<F> draft_token_ids, In<F> num_draft_tokens, In<F> match_len, Optional<F> workspace) {
  F call("ngram_propose_");
  NgramProposeParams p = check_propose(call, token_ids, num_tokens, row_indices, num_sampled);
  const TensorView drafts = call.view("draft_token_ids", draft_token_ids);
  p.draft_token_ids = call.check_draft_rows(drafts, p.batch);
  p.lookup = call.check_lookup(min_n, max_n, drafts.sizes[1], match_policy, overlap, max_len, vocab_size, fill);
  p.num_draft_tokens = call.check_output_int32s(call.view("num_draft_tokens", num_draft_tokens), p.batch);
  p.match_len = call.check_output_int32s(call.view("match_len", match_len), p.batch);
  const auto workspace_view = check_workspace(call, workspace);
  call.check_no_overlap();
  run_lookup<ngram_propose_op>(call, p, workspace_view);
}

template <class F>
auto ngram_step_(In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                 Optional<F> row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n, int64_t k,
                 int64_t match_policy, bool overlap, int64_t max_len, bool fill, Optional<F> workspace) {
  F call("ngram_step_");
  NgramStepParams p{};
  p.token_ids = call.template check_token_rows<int32_t>(call.view("token_ids", token_ids), Arguments::kWrite);
  p.num_tokens = call.check_output_int32s(call.view("num_tokens", num_tokens), p.token_ids.rows);
  p.sampled_token_ids = call.check_sampled_token_ids(call.view("sampled_token_ids", sampled_token_ids));
  p.batch = p.sampled_token_ids.rows;
  p.discard = call.check_mask(call.view("discard", discard), p.batch);
  p.row_indices = call.check_row_indices(call.view("row_indices", row_indices), "sampled_token_ids", p.batch,
                                         p.token_ids.rows, "number of rows of token_ids, because row_indices is None");
  p.advance = advance;
  p.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, vocab_size, fill);
  const auto workspace_view = check_workspace(call, workspace);
  call.check_no_overlap();
  auto next_token_ids = call.empty(p.batch);
  auto num_sampled = call.empty(p.batch);
  DraftOutputs<F> drafts(call, p);
  p.next_token_ids = call.data(next_token_ids);
  p.num_sampled = call.data(num_sampled);
  run_lookup<ngram_step__op>(call, p, workspace_view);
  return call.results(next_token_ids, num_sampled, drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

}  // namespace ngram_npu::api
