#include "host/ngram_step_.h"

namespace ngram_npu::host {

NgramStepParams check_step(Arguments& arguments, const StepArguments& given, const TensorView* workspace) {
  NgramStepParams p{};
  arguments.matrix("token_ids", given.token_ids, DType::kInt32, Arguments::kWrite);
  p.token_ids = token_rows<int32_t>(given.token_ids);
  arguments.vector("num_tokens", given.num_tokens, {DType::kInt32}, p.token_ids.rows, Arguments::kWrite);
  p.num_tokens = static_cast<int32_t*>(given.num_tokens.data);
  arguments.matrix("sampled_token_ids", given.sampled_token_ids, DType::kInt32);
  p.sampled_token_ids = token_rows<const int32_t>(given.sampled_token_ids);
  arguments.scalar("sampled_token_ids width", p.sampled_token_ids.capacity, 1, kMaxSampledWidth);
  p.batch = p.sampled_token_ids.rows;
  p.discard = arguments.mask("discard", given.discard, p.batch);
  p.row_indices = arguments.indices("row_indices", given.row_indices, p.batch);
  if (given.row_indices == nullptr) {
    arguments.at_most("sampled_token_ids", "batch", p.batch, p.token_ids.rows,
                      "rows of token_ids, without row_indices");
  }
  p.advance = given.advance;
  p.vocab_size = given.vocab_size;
  p.lookup = arguments.lookup(given.min_n, given.max_n, given.k, given.match_policy, given.overlap, given.max_len);
  if (workspace != nullptr) {
    arguments.vector("workspace", *workspace, {DType::kInt32}, -1, Arguments::kWrite);
    p.workspace = workspace->data;
  }
  return p;
}

NgramStepParams check_ngram_step_(const StepArguments& given, const TensorView* workspace) {
  Arguments arguments("ngram_step_");
  const NgramStepParams p = check_step(arguments, given, workspace);
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
