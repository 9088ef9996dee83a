// Making, checking and clearing a store; the operators themselves are in ngram_store_{step,finish}.cpp.
//
// A store whose header is not one of ours is no error (its contents are data): the operators do nothing.
#pragma once

#include "core/common.h"

// The parts of a store of that size in words, one behind the other: slots, heads, lines, tokens, bytes, end. All 0
// where no store can have that size.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits,
                                                      int64_t parts[6]);
// Makes an empty store of `words` ZEROED words. kInvalidParams where they do not suffice for that size.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots,
                                                        int64_t num_blocks, int64_t line_bits, uint32_t visibility);
// 0, or the number of the broken rule (core/ngram_store_faults.h), *where naming the slot, block or entry.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_check(const int32_t* store, int64_t words, int64_t* where);
// Tokens held, blocks that are alive, slots whose request is open.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_held(const int32_t* store, int64_t words, int64_t held[3]);
// Takes the store for the caller alone, as a call does; false where another has it, or it is none.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_ngram_store_take(int32_t* store, int64_t words);
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_give_back(int32_t* store, int64_t words);
// Wipes what a scope has, or (null) all. The caller has taken the store.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_clear(int32_t* store, int64_t words, const int64_t* scope);
