// The operators that look n-grams up: check the arguments, make the outputs, call the kernel. `F` is the front end,
// torch or numpy (front_end.h says what it has).
#pragma once

#include "core/ngram_index_append_.h"
#include "core/ngram_index_reset_.h"
#include "core/ngram_index_step_.h"
#include "core/ngram_propose.h"
#include "core/ngram_step_.h"
#include "host/front_end.h"

namespace ngram_npu::host {

NGRAM_NPU_OPERATOR(ngram_propose, NgramProposeParams)
NGRAM_NPU_OPERATOR(ngram_step_, NgramStepParams)
NGRAM_NPU_OPERATOR(ngram_index_step_, NgramIndexStepParams)
NGRAM_NPU_OPERATOR(ngram_index_append_, NgramIndexAppendParams)
NGRAM_NPU_OPERATOR(ngram_index_reset_, NgramIndexResetParams)

// [B, k], [B], [B]: what every lookup returns, last.
template <class F>
struct DraftOutputs {
  typename F::Output draft_token_ids, num_draft_tokens, match_len;

  template <class Params>
  DraftOutputs(const F& call, Params& p)
      : draft_token_ids(call.empty(p.batch, p.lookup.k)),
        num_draft_tokens(call.empty(p.batch)),
        match_len(call.empty(p.batch)) {
    p.draft_token_ids = call.data(draft_token_ids);
    p.num_draft_tokens = call.data(num_draft_tokens);
    p.match_len = call.data(match_len);
  }
};

// The rows that are read, and which of them the requests are.
template <class F, class Params>
void check_rows(F& call, Params& p, In<F> token_ids, In<F> num_tokens, Optional<F> row_indices) {
  p.token_ids = call.template rows<const int32_t>(call("token_ids", token_ids));
  p.num_tokens = call.int32s(call("num_tokens", num_tokens), p.token_ids.rows);
  const auto rows = call("row_indices", row_indices);
  p.row_indices = call.indices(rows, -1);
  p.batch = rows ? rows->sizes[0] : p.token_ids.rows;
}

template <class F, class Params>
void check_index(F& call, Params& p, In<F> index) {
  const TensorView view = call("index", index);
  p.index = call.written_int32s(view, -1);
  p.index_words = view.sizes[0];
}

template <class F>
auto ngram_propose(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, Optional<F> active, int64_t min_n,
                   int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len) {
  F call("ngram_propose");
  NgramProposeParams p{};
  check_rows(call, p, token_ids, num_tokens, row_indices);
  p.active = call.mask(call("active", active), p.batch);
  p.lookup = call.lookup(min_n, max_n, k, match_policy, overlap, max_len);
  DraftOutputs<F> drafts(call, p);
  if (p.batch > 0) {
    const Executor executor = F::executor();
    p.executor = &executor;
    const auto memory = call.template workspace<ngram_propose_op>(p, std::nullopt);
    p.workspace = memory.data();
    call.template run<ngram_propose_op>(p);
  }
  return call.results(drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

// What ngram_step_ and ngram_index_step_ share; `workspace` is checked, not yet used.
template <class F>
NgramStepParams check_step(F& call, In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                           Optional<F> row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n,
                           int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                           const std::optional<TensorView>& workspace) {
  NgramStepParams p{};
  p.token_ids = call.template rows<int32_t>(call("token_ids", token_ids), Arguments::kWrite);
  p.num_tokens = call.written_int32s(call("num_tokens", num_tokens), p.token_ids.rows);
  p.sampled_token_ids = call.sampled(call("sampled_token_ids", sampled_token_ids));
  p.batch = p.sampled_token_ids.rows;
  p.discard = call.mask(call("discard", discard), p.batch);
  p.row_indices = call.row_indices(call("row_indices", row_indices), "sampled_token_ids", p.batch, p.token_ids.rows,
                                   "rows of token_ids, without row_indices");
  p.advance = advance;
  p.vocab_size = vocab_size;
  p.lookup = call.lookup(min_n, max_n, k, match_policy, overlap, max_len);
  if (workspace) call.written_int32s(*workspace, -1);
  return p;
}

// Makes the outputs of a step and calls its kernel: `all` is what the kernel takes, `p` the step in it.
template <class Operator, class F>
auto run_step(F& call, typename Operator::Params& all, NgramStepParams& p, const std::optional<TensorView>& workspace) {
  auto next_token_ids = call.empty(p.batch);
  auto num_sampled = call.empty(p.batch);
  DraftOutputs<F> drafts(call, p);
  p.next_token_ids = call.data(next_token_ids);
  p.num_sampled = call.data(num_sampled);
  if (p.batch > 0) {
    const Executor executor = F::executor();
    p.executor = &executor;
    const auto memory = call.template workspace<Operator>(all, workspace);
    p.workspace = memory.data();
    call.template run<Operator>(all);
  }
  return call.results(next_token_ids, num_sampled, drafts.draft_token_ids, drafts.num_draft_tokens, drafts.match_len);
}

template <class F>
auto ngram_step_(In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                 Optional<F> row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n, int64_t k,
                 int64_t match_policy, bool overlap, int64_t max_len, Optional<F> workspace) {
  F call("ngram_step_");
  const auto memory = call("workspace", workspace);
  NgramStepParams p = check_step(call, token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance,
                                 vocab_size, min_n, max_n, k, match_policy, overlap, max_len, memory);
  call.disjoint();
  return run_step<ngram_step__op>(call, p, p, memory);
}

template <class F>
auto ngram_index_step_(In<F> token_ids, In<F> num_tokens, In<F> sampled_token_ids, Optional<F> discard,
                       Optional<F> row_indices, bool advance, int64_t vocab_size, int64_t min_n, int64_t max_n,
                       int64_t k, int64_t match_policy, bool overlap, int64_t max_len, In<F> index,
                       Optional<F> slot_indices, Optional<F> workspace) {
  F call("ngram_index_step_");
  const auto memory = call("workspace", workspace);
  NgramIndexStepParams p{};
  p.step = check_step(call, token_ids, num_tokens, sampled_token_ids, discard, row_indices, advance, vocab_size, min_n,
                      max_n, k, match_policy, overlap, max_len, memory);
  call.index_span(min_n, max_n);
  check_index(call, p, index);
  p.slot_indices = call.indices(call("slot_indices", slot_indices), p.step.batch);
  p.catch_up_tokens = kNgramIndexCatchUpTokens;
  call.disjoint();
  return run_step<ngram_index_step__op>(call, p, p.step, memory);
}

template <class F>
void ngram_index_append_(In<F> token_ids, In<F> num_tokens, Optional<F> row_indices, In<F> index,
                         Optional<F> slot_indices, int64_t min_n, int64_t max_n, int64_t match_policy) {
  F call("ngram_index_append_");
  NgramIndexAppendParams p{};
  check_rows(call, p, token_ids, num_tokens, row_indices);
  check_index(call, p, index);
  p.slot_indices = call.indices(call("slot_indices", slot_indices), p.batch);
  call.ngram_range(min_n, max_n, match_policy);
  call.index_span(min_n, max_n);
  p.min_n = min_n;
  p.max_n = max_n;
  p.match = static_cast<int32_t>(match_policy);
  call.disjoint();
  if (p.batch == 0) return;
  const Executor executor = F::executor();
  p.executor = &executor;
  call.template run<ngram_index_append__op>(p);
}

template <class F>
void ngram_index_reset_(In<F> index, In<F> slot_indices) {
  F call("ngram_index_reset_");
  NgramIndexResetParams p{};
  check_index(call, p, index);
  const TensorView slots = call("slot_indices", slot_indices);
  p.slot_indices = call.indices(slots, -1);
  p.count = slots.sizes[0];
  call.disjoint();
  if (p.count > 0) call.template run<ngram_index_reset__op>(p);
}

}  // namespace ngram_npu::host
