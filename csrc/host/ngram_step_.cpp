#include "host/ngram_step_.h"

namespace ngram_npu::host {

NgramStepParams check_ngram_step_(const TensorView& token_ids, const TensorView& num_tokens,
                                  const TensorView& sampled_token_ids, const TensorView* discard,
                                  const TensorView* row_indices, bool advance, int64_t vocab_size, int64_t min_n,
                                  int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len,
                                  const TensorView* workspace) {
  Arguments arguments("ngram_step_");
  NgramStepParams p{};
  arguments.matrix("token_ids", token_ids, DType::kInt32, Arguments::kWrite);
  p.token_ids = token_rows<int32_t>(token_ids);
  arguments.vector("num_tokens", num_tokens, {DType::kInt32}, p.token_ids.rows, Arguments::kWrite);
  p.num_tokens = static_cast<int32_t*>(num_tokens.data);
  arguments.matrix("sampled_token_ids", sampled_token_ids, DType::kInt32);
  p.sampled_token_ids = token_rows<const int32_t>(sampled_token_ids);
  arguments.scalar("sampled_token_ids width", p.sampled_token_ids.capacity, 1, kMaxSampledWidth);
  p.batch = p.sampled_token_ids.rows;
  p.discard = arguments.mask("discard", discard, p.batch);
  p.row_indices = arguments.indices("row_indices", row_indices, p.batch);
  if (row_indices == nullptr) {
    arguments.at_most("sampled_token_ids", "batch", p.batch, p.token_ids.rows,
                      "rows of token_ids, without row_indices");
  }
  p.advance = advance;
  p.vocab_size = vocab_size;
  p.lookup = arguments.lookup(min_n, max_n, k, match_policy, overlap, max_len);
  if (workspace != nullptr) {
    arguments.vector("workspace", *workspace, {DType::kInt32}, -1, Arguments::kWrite);
    p.workspace = workspace->data;
  }
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
