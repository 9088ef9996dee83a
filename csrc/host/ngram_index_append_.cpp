#include "host/ngram_index_append_.h"

namespace ngram_npu::host {

NgramIndexAppendParams check_ngram_index_append_(const TensorView& token_ids, const TensorView& num_tokens,
                                                 const TensorView* row_indices, const TensorView& index,
                                                 const TensorView* slot_indices, int64_t min_n, int64_t max_n,
                                                 int64_t match_policy) {
  Arguments arguments("ngram_index_append_");
  NgramIndexAppendParams p{};
  arguments.matrix("token_ids", token_ids, DType::kInt32);
  p.token_ids = token_rows<const int32_t>(token_ids);
  arguments.vector("num_tokens", num_tokens, {DType::kInt32}, p.token_ids.rows);
  p.num_tokens = static_cast<const int32_t*>(num_tokens.data);
  p.row_indices = arguments.indices("row_indices", row_indices, -1);
  p.batch = row_indices ? row_indices->sizes[0] : p.token_ids.rows;
  arguments.vector("index", index, {DType::kInt32}, -1, Arguments::kWrite);
  p.index = static_cast<int32_t*>(index.data);
  p.index_words = index.sizes[0];
  p.slot_indices = arguments.indices("slot_indices", slot_indices, p.batch);
  arguments.ngram_range(min_n, max_n, match_policy);
  arguments.index_span(min_n, max_n);
  p.min_n = min_n;
  p.max_n = max_n;
  p.match = static_cast<int32_t>(match_policy);
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
