#pragma once

#include "core/correct_spec_state_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

CorrectSpecStateParams check_correct_spec_state_(
    const TensorView& num_computed_tokens, const TensorView& num_accepted_tokens, const TensorView& positions,
    const TensorView& seq_lens, const TensorView& slot_mapping, const TensorView* discard,
    const TensorView& prev_positions, const TensorView& num_sampled_prev, const TensorView& num_draft_prev,
    const TensorView& host_num_computed_tokens, const TensorView& query_start_loc, const TensorView* num_tokens,
    const TensorView& block_table, const TensorView* row_indices, int64_t block_size, int64_t blocks_per_kv_block,
    int64_t cp_world, int64_t cp_rank, int64_t cp_interleave, int64_t pad_id, const TensorView* workspace);

}  // namespace ngram_npu::host
