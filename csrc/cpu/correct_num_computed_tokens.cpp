#include "core/correct_num_computed_tokens.h"

#include <cstring>
#include <memory>
#include <new>

#include "cpu/spec_state.h"

namespace ngram_npu::cpu {

int32_t correct_counts(const CorrectNumComputedTokensParams& p) {
  // The new counts wait here until every old one has been read. Batches up to this size need no heap memory.
  constexpr int64_t kOnStack = 2048;
  int32_t on_stack[kOnStack];
  std::unique_ptr<int32_t[]> on_heap;
  int32_t* computed = on_stack;
  if (p.batch > kOnStack) {
    on_heap.reset(new (std::nothrow) int32_t[static_cast<size_t>(p.batch)]);
    if (on_heap == nullptr) return kOutOfMemory;
    computed = on_heap.get();
  }
  for (int64_t i = 0; i < p.batch; ++i) {
    const CorrectedCounts counts = corrected(p, i);
    computed[i] = counts.num_computed;
    if (counts.accepted_changes) p.num_accepted_tokens[i] = counts.num_accepted;
  }
  if (p.batch > 0) std::memcpy(p.num_computed_tokens, computed, static_cast<size_t>(p.batch) * sizeof(int32_t));
  return kOk;
}

}  // namespace ngram_npu::cpu

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_correct_num_computed_tokens_(const CorrectNumComputedTokensParams* params,
                                                                    void*) {
  return cpu::correct_counts(*params);
}
