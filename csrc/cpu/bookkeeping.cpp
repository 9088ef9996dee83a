// CPU kernels of the operators that process sampled tokens and prepare the drafter's batch.
#include "core/bookkeeping.h"

#include <algorithm>

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_next_token_ids(const PrepareNextTokenIdsParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) write_item(*params, i);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs_padded(const PrepareInputsPaddedParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) write_item(*params, i);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_inputs(const PrepareInputsParams* params, void*) {
  const PrepareInputsParams& p = *params;
  int32_t kept_before = 0;
  int64_t num_written = 0;
  p.query_start_loc_out[0] = 0;
  for (int64_t i = 0; i < p.batch; ++i) {
    const KeptTokenCounts counts = count_kept_tokens(p, i);
    kept_before = wrap_add(kept_before, counts.num_kept);
    p.query_start_loc_out[i + 1] = kept_before;
    p.seq_lens_out[i] = wrap_sub(p.seq_lens[i], counts.num_rejected);
    const int64_t num_to_write = smaller<int64_t>(counts.num_kept, p.total_tokens - num_written);
    for (int64_t j = 0; j < num_to_write; ++j) {
      p.token_indices[num_written + j] = wrap_add(p.query_start_loc[i], static_cast<int32_t>(j));
    }
    num_written += num_to_write;
  }
  std::fill(p.token_indices + num_written, p.token_indices + p.total_tokens, kNoToken);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_prepare_input_ids_(const PrepareInputIdsParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) write_item(*params, i, 0, 1);
  return kOk;
}
