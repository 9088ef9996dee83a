// What can be wrong with an index, for NgramIndex.check_integrity(): the CPU's layout and the GPU's.
#pragma once

#include <cstdint>

namespace ngram_npu {

#define NGRAM_NPU_INDEX_FAULTS(X)                                                                                  \
  X(None, "")                                                                                                      \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramIndex or DeviceNgramIndex?") \
  X(Slot, "the directory is deeper than the layout allows")                                                        \
  X(Directory, "a page does not fill its part of the directory evenly")                                            \
  X(Owner, "a page belongs to another slot, or is named twice")                                                    \
  X(PageCount, "the slot's pages are not as many as it says")                                                      \
  X(InUse, "the pages in use are not as many as the header says")                                                  \
  X(FreeList, "the list of freed pages is broken")                                                                 \
  X(Line, "a line of a page has a gap")                                                                            \
  X(Place, "an entry is not where its key leads")                                                                  \
  X(Outside, "an entry points outside the row")                                                                    \
  X(Recorded, "an entry does not record the earliest (or latest) occurrence")                                      \
  X(LazyRule, "an entry exists, or is marked, although no n-gram asks for it")                                     \
  X(Missing, "an entry is missing")                                                                                \
  X(Row, "the slot has indexed more tokens than the row holds")                                                    \
  X(Held, "the slot's entries are not as many as it says")                                                         \
  X(Entries, "the entries in use are not as many as the header says")                                              \
  X(State, "the slot's state is not one that any operator writes")                                                 \
  X(NoSlot, "the index has no such slot")                                                                          \
  X(Candidate, "the slot does not keep the row's candidate")                                                       \
  X(Outcome, "a token's outcome is not the row's")

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
