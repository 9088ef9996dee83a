// What ngram_step_ and ngram_index_step_ return.
#pragma once

#include "core/ngram_step_.h"
#include "torch/compat.h"

namespace ngram_npu::torch_side {

struct StepOutputs {
  Tensor next_token_ids;
  Tensor num_sampled;
  Tensor draft_token_ids;
  Tensor num_draft_tokens;
  Tensor match_len;

  StepOutputs(const Tensor& like, int64_t batch, int64_t k)
      : next_token_ids(empty_like_on(like, {batch})),
        num_sampled(empty_like_on(like, {batch})),
        draft_token_ids(empty_like_on(like, {batch, k})),
        num_draft_tokens(empty_like_on(like, {batch})),
        match_len(empty_like_on(like, {batch})) {}

  void give_to(NgramStepParams& p) const {
    p.next_token_ids = int32_data(next_token_ids);
    p.num_sampled = int32_data(num_sampled);
    p.draft_token_ids = int32_data(draft_token_ids);
    p.num_draft_tokens = int32_data(num_draft_tokens);
    p.match_len = int32_data(match_len);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {next_token_ids, num_sampled, draft_token_ids, num_draft_tokens, match_len};
  }
};

}  // namespace ngram_npu::torch_side
