// C entry points of the operators that use an index or a store, and classes that own the memory of an index or a store.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "core/drafting.h"
#include "core/store.h"
#include "cpu/ngram_index.h"
#include "cpu/ngram_store.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_propose_(const ngram_npu::NgramIndexProposeParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const ngram_npu::NgramIndexResetParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const ngram_npu::NgramIndexStepParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const ngram_npu::NgramStoreStepParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_finish_(const ngram_npu::NgramStoreFinishParams*, void*);

namespace ngram_npu::test {

// Memory of an index or of a store, in 32-bit words.
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

inline int64_t count_store_words(int64_t slots, int64_t blocks, int64_t line_bits) {
  int64_t part_offsets[6];  // the last offset is the store's end
  ngram_npu_cpu_ngram_store_parts(slots, blocks, line_bits, part_offsets);
  return part_offsets[5];
}

struct SharedStore : Words {
  SharedStore(int64_t slots, int64_t blocks, int64_t line_bits, uint32_t visibility = store::kLive)
      : Words(static_cast<size_t>(count_store_words(slots, blocks, line_bits))) {
    if (ngram_npu_cpu_ngram_store_init(data(), count(), slots, blocks, line_bits, visibility) != kOk) std::abort();
  }
  StoreAccess access() { return {data(), count()}; }
  int32_t find_fault() const {
    int64_t location = 0;
    return ngram_npu_cpu_ngram_store_check(data(), count(), &location);
  }
  uint32_t header(int64_t word) const { return static_cast<uint32_t>((*this)[static_cast<size_t>(word)]); }
};

}  // namespace ngram_npu::test
