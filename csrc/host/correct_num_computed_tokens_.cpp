#include "host/correct_num_computed_tokens_.h"

namespace ngram_npu::host {

CorrectNumComputedTokensParams check_counts(Arguments& arguments, const TensorView& num_computed_tokens,
                                            const TensorView& num_accepted_tokens, const TensorView& prev_positions,
                                            const TensorView& num_sampled_prev, const TensorView& num_draft_prev,
                                            const TensorView& host_num_computed_tokens) {
  CorrectNumComputedTokensParams p{};
  p.prev_positions = arguments.indices("prev_positions", &prev_positions, -1);
  p.batch = prev_positions.sizes[0];
  arguments.vector_of_at_least("num_computed_tokens", num_computed_tokens, {DType::kInt32}, p.batch,
                               "size of prev_positions", Arguments::kWrite);
  p.num_computed_tokens = static_cast<int32_t*>(num_computed_tokens.data);
  arguments.vector_of_at_least("num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, p.batch,
                               "size of prev_positions", Arguments::kWrite);
  p.num_accepted_tokens = static_cast<int32_t*>(num_accepted_tokens.data);
  p.num_sampled_prev = arguments.int32s("num_sampled_prev", num_sampled_prev, -1);
  p.num_draft_prev = arguments.int32s("num_draft_prev", num_draft_prev, -1);
  p.num_previous = smaller(num_computed_tokens.sizes[0], smaller(num_sampled_prev.sizes[0], num_draft_prev.sizes[0]));
  p.host_num_computed_tokens = arguments.int32s("host_num_computed_tokens", host_num_computed_tokens, p.batch);
  return p;
}

CorrectNumComputedTokensParams check_correct_num_computed_tokens_(
    const TensorView& num_computed_tokens, const TensorView& num_accepted_tokens, const TensorView& prev_positions,
    const TensorView& num_sampled_prev, const TensorView& num_draft_prev, const TensorView& host_num_computed_tokens) {
  Arguments arguments("correct_num_computed_tokens_");
  const auto p = check_counts(arguments, num_computed_tokens, num_accepted_tokens, prev_positions, num_sampled_prev,
                              num_draft_prev, host_num_computed_tokens);
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
