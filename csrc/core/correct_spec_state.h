// correct_spec_state_: all corrections between two forward passes. Contract: docs/ops/correct_spec_state.md.
#pragma once

#include "core/compute_slot_mapping.h"
#include "core/correct_num_computed_tokens.h"

namespace ngram_npu {

struct CorrectSpecStateParams {
  CorrectNumComputedTokensParams counts;
  ComputeSlotMappingParams slots;  // its positions are those below
  Gm<int64_t> positions;           // [slots.num_positions], written
  Gm<int32_t> seq_lens;            // [num_seq_lens], written
  int64_t num_seq_lens;
  Gm<uint8_t> discard;           // [>= B], written in [0, B); or null
  Gm<const int32_t> num_tokens;  // [num_rows]; read only if discard is given
  int64_t num_rows;
  Gm<void> workspace;  // device backends only
};

// Words of workspace that suffice on any device: the blocks' counter. The counts need none (cuda/spec_state.cuh).
constexpr int64_t kCorrectSpecStateWorkspaceWords = 1;

// The position of token n of the batch, in a request that begins at query_start_loc `begin` with `num_computed` tokens.
NGRAM_FN int64_t position_of(int64_t n, int32_t begin, int32_t num_computed) { return num_computed + (n - begin); }

NGRAM_FN int32_t seq_len_of(const CorrectSpecStateParams& p, int64_t i, int32_t num_computed) {
  return wrap_add(num_computed, scheduled(p.slots.query_start_loc, i));
}

// Whether a request samples nothing: it ends the step before its known tokens end, or it has no row. `State` is the
// parameters or a kernel's copy of num_tokens under this name.
template <class State>
NGRAM_FN bool row_discards(const State& p, int64_t row, int32_t seq_len) {
  return row < 0 || row >= p.num_rows || seq_len < p.num_tokens[row];
}
NGRAM_FN bool discards(const CorrectSpecStateParams& p, int64_t i, int32_t seq_len) {
  return row_discards(p, p.slots.row_indices[i], seq_len);
}

}  // namespace ngram_npu
