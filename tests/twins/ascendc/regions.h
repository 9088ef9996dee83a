// The tensors behind each operator's Params: the only bytes that a launch may touch.
#pragma once

#include <vector>

#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "gm.h"

namespace ngram_npu::twin {

class Regions {
 public:
  template <class T>
  void add(const char* name, T* data, int64_t count) {
    add(name, data, 1, count * static_cast<int64_t>(sizeof(T)), 0, !std::is_const_v<T>);
  }
  void add(const char* name, const IndexArray& indices, int64_t count) {
    add(name, indices.data, 1, count * indices.bytes, 0, false);
  }
  void add(const char* name, const DraftRows& rows, int64_t batch, int64_t k) {
    add(name, rows.data, batch, k * rows.bytes, rows.stride * rows.bytes, true);
  }
  void add(const char* name, const DraftCosts& rows, int64_t batch, int64_t k) {
    add(name, rows.data, batch, k, rows.stride, true);
  }
  template <class T>
  void add(const char* name, const TokenRows<T>& rows) {
    constexpr int64_t item = static_cast<int64_t>(sizeof(T));
    add(name, rows.data, rows.rows, rows.capacity * item, rows.stride * item, !std::is_const_v<T>);
  }
  void add(const char* name, const void* data, int64_t rows, int64_t row_bytes, int64_t pitch, bool writable) {
    if (data == nullptr || rows <= 0 || row_bytes <= 0) return;
    list.push_back({name, reinterpret_cast<uintptr_t>(data), static_cast<uint64_t>(rows),
                    static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows == 1 ? row_bytes : pitch), writable});
  }

  std::vector<Region> list;
};

template <class Params>  // of a lookup
void tensors(const Params& p, Regions& r) {
  if constexpr (std::is_same_v<Params, NgramStepParams>) {
    r.add("sampled_token_ids", p.sampled_token_ids);
    r.add("discard", p.discard, p.batch);
    r.add("next_token_ids", p.next_token_ids, p.batch);
  }
  r.add("token_ids", p.token_ids);
  r.add("num_tokens", p.num_tokens, p.token_ids.rows);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
  r.add("match_costs", p.lookup.match_costs, kCostRows);
  r.add("draft_token_ids", p.draft_token_ids, p.batch, p.lookup.k);
  r.add("draft_costs", p.draft_costs, p.batch, p.lookup.k);
  r.add("num_draft_tokens", p.num_draft_tokens, p.batch);
  r.add("match_len", p.match_len, p.batch);
}

inline void tensors(const PrepareNextTokenIdsParams& p, Regions& r) {
  r.add("sampled_token_ids", p.sampled_token_ids);
  r.add("discard", p.discard, p.batch);
  r.add("backup_token_ids", p.backup_token_ids, p.batch);
  r.add("token_ids", p.token_ids);
  r.add("num_tokens", p.num_tokens, p.token_ids.rows);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("next_token_ids", p.next_token_ids, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
}

inline void tensors(const PrepareInputsPaddedParams& p, Regions& r) {
  r.add("cu_num_draft_tokens", p.cu_num_draft_tokens, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("token_indices_to_sample", p.token_indices_to_sample, p.batch);
  r.add("num_rejected", p.num_rejected, p.batch);
}

inline void tensors(const PrepareInputsParams& p, Regions& r) {
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("seq_lens", p.seq_lens, p.batch);
  r.add("num_rejected", p.num_rejected, p.batch);
  r.add("query_start_loc_out", p.query_start_loc_out, p.batch + 1);
  r.add("seq_lens_out", p.seq_lens_out, p.batch);
  r.add("token_indices", p.token_indices, p.total_tokens);
}

inline void tensors(const CorrectNumComputedTokensParams& p, Regions& r) {
  r.add("num_computed_tokens", p.num_computed_tokens, larger(p.batch, p.num_previous));
  r.add("num_accepted_tokens", p.num_accepted_tokens, p.batch);
  r.add("prev_positions", p.prev_positions, p.batch);
  r.add("num_sampled_prev", p.num_sampled_prev, p.num_previous);
  r.add("num_draft_prev", p.num_draft_prev, p.num_previous);
  r.add("host_num_computed_tokens", p.host_num_computed_tokens, p.batch);
}

inline void tensors(const ComputeSlotMappingParams& p, Regions& r) {
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("positions", p.positions, p.num_positions);
  r.add("block_table", p.block_table);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("slot_mapping", p.slot_mapping, 1, p.num_slots * p.slot_bytes, 0, true);
}

inline void tensors(const CorrectSpecStateParams& p, Regions& r) {
  r.add("positions", p.positions, p.slots.num_positions);  // added before the slots' own region, which is read-only
  tensors(p.counts, r);
  tensors(p.slots, r);
  r.add("seq_lens", p.seq_lens, p.num_seq_lens);
  r.add("discard", p.discard, p.slots.batch);
  r.add("num_tokens", p.num_tokens, p.num_rows);
}

inline void tensors(const PrepareInputIdsParams& p, Regions& r) {
  r.add("input_ids", p.input_ids, p.num_inputs);
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("prev_positions", p.prev_positions, p.batch);
  r.add("next_token_ids", p.next_token_ids, p.draft_token_ids.rows);
  r.add("draft_token_ids", p.draft_token_ids);
  r.add("num_scheduled_drafts", p.num_scheduled_drafts, p.batch);
}

}  // namespace ngram_npu::twin
