#include "core/ngram_index_reset.h"
#include "cuda/ngram_index.cuh"

namespace ngram_npu {

using namespace device_index;

static __device__ void write_item(const NgramIndexResetParams& p, int64_t i) {
  const Table table = open_table(p.index.words, p.index.num_words);
  if (!table.has(p.index.slot_indices[i])) return;
  const uint32_t slot_id = static_cast<uint32_t>(p.index.slot_indices[i]);
  uint32_t* slot = table.slot(slot_id);
  // A slot may be named twice: whoever empties it does all of it. One that is empty keeps its generation.
  if (atomicExch(slot + kSlotOptions, 0u) == 0) return;
  cuda::drop_entries(table, slot_id);
  for (int64_t word = kSlotIndexed; word < kSlotWords; ++word) slot[word] = 0;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_reset_(const NgramIndexResetParams* params, void* stream) {
  if (params->count < 1 || params->count > INT32_MAX) return kInvalidParams;
  return cuda::launch_items(*params, params->count, stream);
}

}  // namespace ngram_npu
