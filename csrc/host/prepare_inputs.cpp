#include "host/prepare_inputs.h"

namespace ngram_npu::host {

PrepareInputsParams check_prepare_inputs(const TensorView& query_start_loc, const TensorView& seq_lens,
                                         const TensorView& num_rejected, int64_t total_tokens) {
  Arguments arguments("prepare_inputs");
  PrepareInputsParams p{};
  p.batch = arguments.query_start_loc(query_start_loc, -1);
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data);
  p.seq_lens = arguments.int32s("seq_lens", seq_lens, p.batch);
  p.num_rejected = arguments.int32s("num_rejected", num_rejected, p.batch);
  arguments.scalar("total_tokens", total_tokens, 0, INT32_MAX);
  p.total_tokens = total_tokens;
  return p;
}

}  // namespace ngram_npu::host
