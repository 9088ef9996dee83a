// Making, sizing and checking an index of the layout that GPU kernels use (core/ngram_index_device_layout.h), in host
// memory: what is made here is copied to the device, and what is checked was copied from there.
#pragma once

#include "core/common.h"
#include "core/ngram_index_faults.h"

namespace ngram_npu::host {

// The words of an index of that size; 0 where none can be that large.
int64_t device_index_words(int64_t num_slots, int64_t num_buckets);
// The buckets that `tokens` tokens need, whatever they are: an entry a token and n.
int64_t device_index_buckets(int64_t tokens, int64_t min_n, int64_t max_n);
// Makes an empty index of ZEROED words, of which the first 64 need to be at hand; false where there can be none such.
// Fewer bits than there are of a fingerprint or a generation change no answer: for tests.
bool device_index_init(int32_t* header, int64_t num_slots, int64_t num_buckets, int32_t fingerprint_bits,
                       int32_t generation_bits);
// What can be checked without the tokens; *where names the slot.
IndexFault check_device_index(const int32_t* index, int64_t words, int64_t* where);
// One slot against the row it indexes: for every gram that occurs, its entries record the right occurrence, and there
// are no others.
IndexFault check_device_index_row(const int32_t* index, int64_t words, int64_t slot, const int32_t* tokens,
                                  int64_t num_tokens);

}  // namespace ngram_npu::host
