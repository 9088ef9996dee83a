#include "host/prepare_inputs_padded.h"

namespace ngram_npu::host {

PrepareInputsPaddedParams check_prepare_inputs_padded(const TensorView& cu_num_draft_tokens,
                                                      const TensorView& num_sampled,
                                                      const TensorView& query_start_loc) {
  Arguments arguments("prepare_inputs_padded");
  PrepareInputsPaddedParams p{};
  p.cu_num_draft_tokens = arguments.int32s("cu_num_draft_tokens", cu_num_draft_tokens, -1);
  p.batch = cu_num_draft_tokens.sizes[0];
  p.num_sampled = arguments.int32s("num_sampled", num_sampled, p.batch);
  arguments.query_start_loc(query_start_loc, p.batch);
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data);
  return p;
}

}  // namespace ngram_npu::host
