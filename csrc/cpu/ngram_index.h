// Functions that create, size and check an index, for api/numpy/index_tools.cpp. The operators are in drafting.cpp.
//
// An index with an invalid header is not an error, because the contents of a tensor are data: the operators that draft
// scan the rows, and ngram_index_append_ and ngram_index_reset_ do nothing.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// Faults that ngram_npu_cpu_ngram_index_check reports.
#define NGRAM_NPU_INDEX_FAULTS(X)                                                              \
  X(None, "")                                                                                  \
  X(Header, "the header does not match the tensor's size; was the tensor made by NgramIndex?") \
  X(Slot, "the directory is deeper than the layout allows")                                    \
  X(Directory, "a page does not fill its part of the directory evenly")                        \
  X(Owner, "a page belongs to another slot, or is listed twice")                               \
  X(PageCount, "the slot's number of pages does not match its pages")                          \
  X(InUse, "the header's number of pages in use does not match the pages")                     \
  X(FreeList, "the list of freed pages is broken")                                             \
  X(Line, "a line of a page has a gap")                                                        \
  X(Place, "an entry is not in the page and line of its key")                                  \
  X(Outside, "an entry points outside the row")                                                \
  X(Recorded, "an entry does not record the earliest (or latest) occurrence")                  \
  X(LazyRule, "an entry exists, or is marked, although the row does not require it")           \
  X(Missing, "an entry is missing")                                                            \
  X(Row, "the slot has indexed more tokens than the row has")                                  \
  X(NoSlot, "the index has no such slot")                                                      \
  X(Candidate, "the slot's candidate is not that of its row")                                  \
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

// Number of words of an index with these numbers of slots and pages; 0 if a number is out of range.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_index_words(int64_t num_slots, int64_t num_pages);
// Number of pages that are enough for `tokens` tokens in at most num_slots rows: tokens of text or, with any_data, any
// tokens. Returns 0 if an index cannot have so many pages. A ladder ignores min_n and max_n.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_index_pages(int64_t tokens, int64_t num_slots, int64_t min_n,
                                                         int64_t max_n, bool any_data, bool ladder, bool outcomes);
// Creates an empty index in `words` zeroed words. Returns kInvalidParams if the memory is too small for one page.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_init(int32_t* index, int64_t words, int64_t num_slots);
// Makes the checks that do not need the rows' tokens. Returns an IndexFault (0: no fault); *location is the slot or
// page.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_check(const int32_t* index, int64_t words, int64_t* location);
// Checks that every entry of one slot is in the page and line of its n-gram's key, records the right occurrence in the
// row, and follows the lazy rule (ngram_index_table.h). Returns an IndexFault (0: no fault).
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_check_row(const int32_t* index, int64_t words, int64_t slot,
                                                             const int32_t* tokens, int64_t num_tokens);
// Writes the number of tokens that each of `count` slots has indexed; 0 for a slot that does not exist.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_index_lengths(const int32_t* index, int64_t words, const int32_t* slots,
                                                        int64_t count, int64_t* lengths);
