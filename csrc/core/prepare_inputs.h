// prepare_inputs: remove the rejected tokens from the flat batch. Contract: docs/ops/prepare_inputs.md.
#pragma once

#include "core/batch.h"

namespace ngram_npu {

struct PrepareInputsParams {
  Gm<const int32_t> query_start_loc;  // [B + 1]
  Gm<const int32_t> seq_lens;         // [B]
  Gm<const int32_t> num_rejected;     // [B]
  int64_t batch;
  int64_t total_tokens;
  Gm<int32_t> query_start_loc_out;  // [B + 1]
  Gm<int32_t> seq_lens_out;         // [B]
  Gm<int32_t> token_indices;        // [total_tokens]
};

struct KeptTokens {
  int32_t kept;
  int32_t rejected;
};

// `Batch` is the parameters or a kernel's copies of their arrays under the same names.
template <class Batch>
NGRAM_FN KeptTokens kept_tokens(const Batch& p, int64_t i) {
  const int32_t length = larger(scheduled(p.query_start_loc, i), 0);
  const int32_t rejected = smaller(larger(p.num_rejected[i], 0), length);
  return {length - rejected, rejected};
}

}  // namespace ngram_npu
