// Faults that NgramIndex.check_integrity() reports, for the CPU's and the GPU's layout.
#pragma once

#include <cstdint>

namespace ngram_npu {

#define NGRAM_NPU_INDEX_FAULTS(X)                                                                                  \
  X(None, "")                                                                                                      \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramIndex or DeviceNgramIndex?") \
  X(Slot, "the directory is deeper than the layout allows")                                                        \
  X(Directory, "a page does not fill its part of the directory evenly")                                            \
  X(Owner, "a page belongs to another slot, or is named twice")                                                    \
  X(PageCount, "the slot's number of pages does not match its pages")                                              \
  X(InUse, "the header's number of pages in use does not match the pages")                                         \
  X(FreeList, "the list of freed pages is broken")                                                                 \
  X(Line, "a line of a page has a gap")                                                                            \
  X(Place, "an entry is not where its key leads")                                                                  \
  X(Outside, "an entry points outside the row")                                                                    \
  X(Recorded, "an entry does not record the earliest (or latest) occurrence")                                      \
  X(LazyRule, "an entry exists, or is marked, although no n-gram asks for it")                                     \
  X(Missing, "an entry is missing")                                                                                \
  X(Row, "the slot has indexed more tokens than the row holds")                                                    \
  X(Held, "the slot's number of entries does not match its entries")                                               \
  X(Entries, "the header's number of entries does not match the entries")                                          \
  X(State, "the slot's state is not one that any operator writes")                                                 \
  X(NoSlot, "the index has no such slot")                                                                          \
  X(Candidate, "the slot's candidate is not that of its row")                                                      \
  X(Outcome, "a token's outcome is not that of its row")

enum IndexFault : int32_t {
#define NGRAM_NPU_FAULT(name, text) kFault##name,
  NGRAM_NPU_INDEX_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

constexpr const char* kIndexFaultTexts[] = {
#define NGRAM_NPU_FAULT(name, text) text,
    NGRAM_NPU_INDEX_FAULTS(NGRAM_NPU_FAULT)
#undef NGRAM_NPU_FAULT
};

}  // namespace ngram_npu
