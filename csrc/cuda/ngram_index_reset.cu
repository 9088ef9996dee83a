#include "core/ngram_index_reset.h"
#include "cuda/ngram_index.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads) ngram_index_reset_kernel(const __grid_constant__ NgramIndexResetParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const Table table = open_table(p.index.words, p.index.num_words);
  if (i >= p.count || !table.has(p.index.slot_indices[i])) return;
  const uint32_t slot_id = static_cast<uint32_t>(p.index.slot_indices[i]);
  uint32_t* slot = table.slot(slot_id);
  // A slot may be named twice: whoever empties it does all of it. One that is empty keeps its generation.
  if (atomicExch(slot + kSlotOptions, 0u) == 0) return;
  drop_entries(table, slot_id);
  for (int64_t word = kSlotIndexed; word < kSlotWords; ++word) slot[word] = 0;
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_reset_(const NgramIndexResetParams* params, void* stream) {
  if (params->count < 1 || params->count > INT32_MAX) return kInvalidParams;
  return cuda::launch(cuda::ngram_index_reset_kernel, cuda::blocks_for(params->count, cuda::kThreads), cuda::kThreads,
                      stream, *params);
}
