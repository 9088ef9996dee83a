// The index arguments that all index operators share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

struct IndexAccess {
  int32_t* words;  // see ngram_npu_cpu_ngram_index_words
  int64_t num_words;
  IndexArray slot_indices;  // [B]; absent: the slot of a row is the row

  NGRAM_FN int64_t slot_of(int64_t i, int64_t row) const { return slot_indices.bytes != 0 ? slot_indices[i] : row; }
};

}  // namespace ngram_npu
