// What a slot remembers of its row, and whether that row is still the one it indexed.
#pragma once

#include "core/ngram_index_layout.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {

// Makes the slot ready to go on from what it has indexed of this row: options, length and last tokens must agree, else
// it is emptied. `known` is how many tokens of the row stood there before this call. Returns whether the slot is
// usable.
bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t known);

// Notes that the slot has indexed the first `length` tokens.
void note_indexed(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length);

}  // namespace ngram_npu::cpu
