#include "host/ngram_propose.h"

namespace ngram_npu::host {

NgramProposeParams check_ngram_propose(const TensorView& token_ids, const TensorView& num_tokens,
                                       const TensorView* row_indices, const TensorView* active, int64_t min_n,
                                       int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len) {
  Arguments arguments("ngram_propose");
  NgramProposeParams p{};
  arguments.matrix("token_ids", token_ids, DType::kInt32);
  p.token_ids = token_rows<const int32_t>(token_ids);
  arguments.vector("num_tokens", num_tokens, {DType::kInt32}, p.token_ids.rows);
  p.num_tokens = static_cast<const int32_t*>(num_tokens.data);
  p.row_indices = arguments.indices("row_indices", row_indices, -1);
  p.batch = row_indices ? row_indices->sizes[0] : p.token_ids.rows;
  p.active = arguments.mask("active", active, p.batch);
  p.lookup = arguments.lookup(min_n, max_n, k, match_policy, overlap, max_len);
  return p;
}

}  // namespace ngram_npu::host
