#include "core/ngram_store_finish.h"

#include "cpu/ngram_store.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_finish_(const NgramStoreFinishParams* params, void*) {
  cpu::Store store;
  if (!cpu::open_store(params->store.words, params->store.num_words, &store)) return kOk;
  const cpu::StoreUse use(store);
  if (!use) {
    cpu::count_busy(store);
    return kOk;
  }
  cpu::Entering entering(store);
  for (int64_t i = 0; i < params->count; ++i) {
    const int64_t slot = params->slot_indices[i];
    if (slot >= 0 && slot < store.num_slots) cpu::close_slot(store, static_cast<uint32_t>(slot), &entering);
  }
  return kOk;
}
