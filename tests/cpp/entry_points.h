// C entry points of the operators that use an index, and a class that owns its memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "core/drafting.h"
#include "cpu/ngram_index.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_propose_(const ngram_npu::NgramIndexProposeParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const ngram_npu::NgramIndexResetParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const ngram_npu::NgramIndexStepParams*, void*);

namespace ngram_npu::test {

// Memory of an index, in 32-bit words.
struct Words : std::vector<int32_t> {
  using vector::vector;
  int64_t count() const { return static_cast<int64_t>(size()); }
};

struct Index : Words {
  Index(int64_t slots, int64_t pages) : Words(static_cast<size_t>(ngram_npu_cpu_ngram_index_words(slots, pages))) {
    if (ngram_npu_cpu_ngram_index_init(data(), count(), slots) != kOk) std::abort();
  }
  IndexAccess access(IndexArray slots = {}) { return {data(), count(), slots}; }
  int32_t find_fault() const { return ngram_npu_cpu_ngram_index_check(data(), count(), nullptr); }
};

}  // namespace ngram_npu::test
