#include "core/ngram_index_reset.h"

#include "cpu/ngram_index_arena.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const NgramIndexResetParams* params, void*) {
  cpu::Arena arena;
  if (!cpu::open_arena(params->index.words, params->index.num_words, &arena)) return kOk;
  for (int64_t i = 0; i < params->count; ++i) {
    const int64_t slot = params->index.slot_indices[i];
    if (slot >= 0 && slot < arena.num_slots) cpu::clear_slot(arena, static_cast<uint32_t>(slot));
  }
  return kOk;
}
