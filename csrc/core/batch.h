// The flat batch: request i's tokens are [query_start_loc[i], query_start_loc[i + 1]).
#pragma once

#include "core/common.h"

namespace ngram_npu {

struct TokenRange {
  int64_t begin;
  int64_t end;
};

// The tokens of a request that lie in a tensor of `size` items; begin >= end if there are none. `Offsets` is
// query_start_loc, or the part of it that a kernel has loaded.
template <class Offsets>
NGRAM_FN TokenRange tokens_of(const Offsets& query_start_loc, int64_t i, int64_t size) {
  return {larger<int64_t>(query_start_loc[i], 0), smaller<int64_t>(query_start_loc[i + 1], size)};
}

// The number of a request's tokens, including those beyond the tensors' sizes.
template <class Offsets>
NGRAM_FN int32_t scheduled(const Offsets& query_start_loc, int64_t i) {
  return wrap_sub(query_start_loc[i + 1], query_start_loc[i]);
}

}  // namespace ngram_npu
