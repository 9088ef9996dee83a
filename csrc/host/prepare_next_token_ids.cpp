#include "host/prepare_next_token_ids.h"

namespace ngram_npu::host {

PrepareNextTokenIdsParams check_prepare_next_token_ids(const TensorView& sampled_token_ids, const TensorView* discard,
                                                       const TensorView* backup_token_ids, const TensorView* token_ids,
                                                       const TensorView* num_tokens, const TensorView* row_indices,
                                                       int64_t vocab_size) {
  Arguments arguments("prepare_next_token_ids");
  PrepareNextTokenIdsParams p{};
  arguments.matrix("sampled_token_ids", sampled_token_ids, DType::kInt32);
  p.sampled_token_ids = token_rows<const int32_t>(sampled_token_ids);
  arguments.scalar("sampled_token_ids width", p.sampled_token_ids.capacity, 1, kMaxSampledWidth);
  p.batch = p.sampled_token_ids.rows;
  p.discard = arguments.mask("discard", discard, p.batch);
  if (backup_token_ids != nullptr) {
    constexpr const char* kGiven = "backup_token_ids is given";
    p.backup_token_ids = arguments.int32s("backup_token_ids", *backup_token_ids, p.batch);
    arguments.absent("token_ids", token_ids, kGiven);
    arguments.absent("num_tokens", num_tokens, kGiven);
    arguments.absent("row_indices", row_indices, kGiven);
  } else {
    if (token_ids == nullptr) arguments.fail("token_ids", "a tensor (backup_token_ids is not given)", "None");
    if (num_tokens == nullptr) arguments.fail("num_tokens", "a tensor (token_ids is given)", "None");
    arguments.matrix("token_ids", *token_ids, DType::kInt32);
    p.token_ids = token_rows<const int32_t>(*token_ids);
    p.num_tokens = arguments.int32s("num_tokens", *num_tokens, p.token_ids.rows);
    p.row_indices = arguments.indices("row_indices", row_indices, p.batch);
    if (row_indices == nullptr) {
      arguments.at_most("sampled_token_ids", "batch", p.batch, p.token_ids.rows,
                        "rows of token_ids, without row_indices");
    }
  }
  p.vocab_size = vocab_size;
  return p;
}

}  // namespace ngram_npu::host
