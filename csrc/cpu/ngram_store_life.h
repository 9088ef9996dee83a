// Making, checking and clearing a store; the operators themselves are in ngram_store_{step,finish}.cpp.
//
// A store with an invalid header is not an error, because its contents are data: the operators do nothing.
#pragma once

#include "core/common.h"

// The offsets of a store's parts in words: slots, heads, lines, tokens, bytes, end. All 0 if a store cannot have these
// sizes.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits,
                                                      int64_t parts[6]);
// Makes an empty store from `words` ZEROED words. kInvalidParams if they are too few for these sizes.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_init(int32_t* store, int64_t words, int64_t num_slots,
                                                        int64_t num_blocks, int64_t line_bits, uint32_t visibility);
// Returns 0 or the number of the broken rule (core/ngram_store_faults.h); *where is the slot, block or entry.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_check(const int32_t* store, int64_t words, int64_t* where);
// Writes the number of tokens held, of live blocks, and of slots with an open request.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_held(const int32_t* store, int64_t words, int64_t held[3]);
// Locks the store for the caller, as operators do; false if another call holds the lock, or it is not a store.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_ngram_store_take(int32_t* store, int64_t words);
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_give_back(int32_t* store, int64_t words);
// Wipes the text of a scope, or (null) of all. The caller holds the lock.
NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_store_clear(int32_t* store, int64_t words, const int64_t* scope);
