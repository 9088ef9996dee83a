// Operators that process sampled tokens and prepare the drafter's batch. arguments.h describes F and its checks.
#pragma once

#include "api/arguments.h"
#include "core/bookkeeping.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(gather_sampled_tokens_, GatherSampledTokensParams)

template <class F>
void gather_sampled_tokens_(In<F> token_ids, In<F> num_tokens, In<F> num_sampled, Optional<F> row_indices,
                            In<F> sampled_tokens) {
  F call("gather_sampled_tokens_");
  GatherSampledTokensParams p{};
  check_grown_rows(call, p, token_ids, num_tokens, num_sampled, row_indices);
  const TensorView output = call.view("sampled_tokens", sampled_tokens);
  p.sampled_tokens = call.template check_token_rows<int32_t>(output, Arguments::kWrite);
  call.check_shape(output, p.batch, output.sizes[1]);
  call.check_scalar("sampled_tokens width", output.sizes[1], 2, kMaxSampledWidth + 1);  // column 0: number of tokens
  call.check_no_overlap();
  if (p.batch > 0) call.template run<gather_sampled_tokens__op>(p);
}

}  // namespace ngram_npu::api
