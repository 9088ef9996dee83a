// Making, sizing and checking an index in the GPU layout (core/ngram_index_device_layout.h), in host memory: the caller
// copies a new index to the device, and an index to check from it.
#pragma once

#include "core/common.h"
#include "core/ngram_index_faults.h"

namespace ngram_npu::host {

// The words of an index of that size; 0 if that is too large.
int64_t device_index_words(int64_t num_slots, int64_t num_buckets);
// The buckets that any `tokens` tokens need: one entry per token and n.
int64_t device_index_buckets(int64_t tokens, int64_t min_n, int64_t max_n);
// Writes the header of an empty index, whose other words are ZERO; false if the sizes are not possible. Tests pass
// fewer bits of a fingerprint or a generation, which change no result.
bool device_index_init(int32_t* header, int64_t num_slots, int64_t num_buckets, int32_t fingerprint_bits,
                       int32_t generation_bits);
// Checks what needs no tokens; *where is the slot.
IndexFault check_device_index(const int32_t* index, int64_t words, int64_t* where);
// Checks one slot against its row: each gram that occurs has an entry with the right occurrence, and there are no other
// entries.
IndexFault check_device_index_row(const int32_t* index, int64_t words, int64_t slot, const int32_t* tokens,
                                  int64_t num_tokens);

}  // namespace ngram_npu::host
