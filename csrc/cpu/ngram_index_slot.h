// The state of a slot's row, and whether the row is still the one that was indexed.
#pragma once

#include "core/ngram_index_layout.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {

// Prepares the slot to continue with this row: options, length and last tokens must agree, otherwise it is emptied.
// `known` is the number of tokens in the row before this call. Returns whether the slot is usable.
bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t known);

// Records that the slot has indexed the first `length` tokens.
void note_indexed(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length);

}  // namespace ngram_npu::cpu
