// Faults that NgramStore.check_integrity() reports.
#pragma once

#include <cstdint>

namespace ngram_npu {

#define NGRAM_NPU_STORE_FAULTS(X)                                                                    \
  X(None, "")                                                                                        \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramStore?")       \
  X(Slot, "a slot's block belongs to another request, or has more tokens than the slot")             \
  X(Block, "a block is not where its serial number leads, or its serial number was not assigned")    \
  X(Fill, "a block's number of tokens exceeds its size")                                             \
  X(Link, "a block does not follow the one that it names as its previous one, or has another scope") \
  X(Place, "an entry points beyond the text, or to text that was cleared")                           \
  X(Key, "an entry is not where its gram leads")                                                     \
  X(Counts, "an entry was wrong more often than its rule allows")                                    \
  X(Twice, "a gram has two entries")

enum StoreFault : int32_t {
#define NGRAM_NPU_FAULT(name, text) kStoreFault##name,
  NGRAM_NPU_STORE_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

constexpr const char* kStoreFaultTexts[] = {
#define NGRAM_NPU_FAULT(name, text) text,
    NGRAM_NPU_STORE_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

}  // namespace ngram_npu
