#include "host/prepare_input_ids_.h"

namespace ngram_npu::host {

PrepareInputIdsParams check_prepare_input_ids_(const TensorView& input_ids, const TensorView& query_start_loc,
                                               const TensorView& prev_positions, const TensorView& next_token_ids,
                                               const TensorView& draft_token_ids,
                                               const TensorView& num_scheduled_drafts, int64_t pad_token) {
  Arguments arguments("prepare_input_ids_");
  PrepareInputIdsParams p{};
  arguments.vector("input_ids", input_ids, {DType::kInt32}, -1, Arguments::kWrite);
  p.input_ids = static_cast<int32_t*>(input_ids.data);
  p.num_inputs = input_ids.sizes[0];
  p.prev_positions = arguments.indices("prev_positions", &prev_positions, -1);
  p.batch = prev_positions.sizes[0];
  arguments.query_start_loc(query_start_loc, p.batch);
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data);
  arguments.matrix("draft_token_ids", draft_token_ids, DType::kInt32);
  p.draft_token_ids = token_rows<const int32_t>(draft_token_ids);
  p.next_token_ids = arguments.int32s("next_token_ids", next_token_ids, p.draft_token_ids.rows);
  p.num_scheduled_drafts = arguments.int32s("num_scheduled_drafts", num_scheduled_drafts, p.batch);
  arguments.scalar("pad_token", pad_token, INT32_MIN, INT32_MAX);
  p.pad_token = static_cast<int32_t>(pad_token);
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
