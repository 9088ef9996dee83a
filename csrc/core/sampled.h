// The valid ones of a request's sampled tokens.
#pragma once

#include "core/common.h"

namespace ngram_npu {

NGRAM_FN bool is_valid_token(int32_t token, int64_t vocab_size) { return token >= 0 && token < vocab_size; }

// The leading run of valid entries: a rejection sampler writes -1 for rejected tokens.
template <class Tokens>
NGRAM_FN int64_t leading_run(const Tokens& sampled, int64_t width, int64_t vocab_size) {
  int64_t n = 0;
  while (n < width && is_valid_token(sampled[n], vocab_size)) ++n;
  return n;
}

}  // namespace ngram_npu
