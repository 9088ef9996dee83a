// Making, sizing and checking an index; the operators themselves are in ngram_index_{step,append,reset}_.cpp.
//
// An index whose header is not one of ours is no error (its contents are data): the step scans, append and reset do
// nothing.
#pragma once

#include "core/common.h"

// The words of an index with that many slots and pages; 0 where no index can be that large.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_index_words(int64_t num_slots, int64_t num_pages);
// The pages that `tokens` tokens in at most num_slots rows need: of text, or (any_data) of whatever they may be; 0
// where no index can have so many. Of a ladder min_n and max_n do not count.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_ngram_index_pages(int64_t tokens, int64_t num_slots, int64_t min_n,
                                                         int64_t max_n, bool any_data, bool ladder, bool outcomes);
// Makes an empty index of `words` ZEROED words. kInvalidParams where they do not suffice for one page.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_init(int32_t* index, int64_t words, int64_t num_slots);
// What can be checked without the tokens: 0, or the number of the broken rule (ngram_index_check.cpp), *where naming
// the slot or page.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_check(const int32_t* index, int64_t words, int64_t* where);
// The same for one slot against the row it indexes: every entry stands where its gram hashes to, records a right
// occurrence, and obeys the lazy rule.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_check_row(const int32_t* index, int64_t words, int64_t slot,
                                                             const int32_t* tokens, int64_t num_tokens);
// How many tokens each of `count` slots has indexed; 0 for one that the index does not have.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_index_lengths(const int32_t* index, int64_t words, const int32_t* slots,
                                                        int64_t count, int64_t* lengths);
