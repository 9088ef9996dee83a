// AscendC kernels of the operators that correct counts, positions and slots between forward passes. plans.h plans their
// launches.
#include "core/correction.h"

#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

// The arrays from which corrected_counts() computes the counts of any request, with the same member names as the
// parameters.
struct StagedCounts : StagedCountsLayout {
  const int64_t num_previous;
  RandomAccessIndices prev_positions;
  RandomAccessArray<int32_t> num_computed_tokens, num_sampled_prev, num_draft_prev, host_num_computed_tokens;

  __aicore__ inline StagedCounts(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p)
      : num_previous(p.num_previous),
        prev_positions(pipe, p.prev_positions, p.batch),
        num_computed_tokens(pipe, p.num_computed_tokens, p.num_previous),
        num_sampled_prev(pipe, p.num_sampled_prev, p.num_previous),
        num_draft_prev(pipe, p.num_draft_prev, p.num_previous),
        host_num_computed_tokens(pipe, p.host_num_computed_tokens, p.batch) {}

  __aicore__ inline void load() {
    prev_positions.load();
    num_computed_tokens.load();
    num_sampled_prev.load();
    num_draft_prev.load();
    host_num_computed_tokens.load();
  }
};

// The corrected counts of a pass of requests. Any request may need the old count of any other request. A second launch
// therefore copies the new counts from the workspace to num_computed_tokens.
class CountPass : public CountPassLayout {
 public:
  __aicore__ inline CountPass(AscendC::TPipe& pipe, int64_t per_pass)
      : computed_(pipe, per_pass), accepted_(pipe, per_pass) {}

  // Only the core that writes a request's value of num_accepted_tokens loads it.
  __aicore__ inline void load(const CorrectNumComputedTokensParams& p, int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    accepted_.load(0, p.num_accepted_tokens + first, count);
  }
  // Returns the new number of computed tokens of request j of the pass.
  __aicore__ inline int32_t correct(const StagedCounts& staged_counts, int64_t j) {
    const CorrectedCounts counts = corrected_counts(staged_counts, first_ + j);
    computed_.set(j, counts.num_computed);
    if (counts.changes_accepted) accepted_.set(j, counts.num_accepted);
    return counts.num_computed;
  }
  __aicore__ inline void store(const CorrectNumComputedTokensParams& p, Gm<int32_t> new_counts) {
    computed_.store(0, new_counts + first_, count_);
    accepted_.store(0, p.num_accepted_tokens + first_, count_);
  }

 private:
  LocalBuffer<int32_t> computed_, accepted_;
  int64_t first_ = 0, count_ = 0;
};

__aicore__ inline void correct_num_computed_tokens_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectNumComputedTokensParams>(args.params);
  const CoreTiling core_tiling = read_as<BatchTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  StagedCounts staged_counts(pipe, p);
  CountPass counts(pipe, core_tiling.per_pass);
  staged_counts.load();
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    counts.load(p, first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) counts.correct(staged_counts, j);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    counts.store(p, Gm<int32_t>(args.workspace));
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }
}

// The second launch of correct_num_computed_tokens_ and of correct_spec_state_ copies the new counts to
// num_computed_tokens. Both can use this kernel, because CorrectSpecStateParams begins with
// CorrectNumComputedTokensParams.
__aicore__ inline void copy_num_computed_tokens_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectNumComputedTokensParams>(args.params);
  const CoreTiling core_tiling = read_as<BatchTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  LocalBuffer<int32_t> new_counts(pipe, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    new_counts.load(0, Gm<const int32_t>(args.workspace) + first, count);
    sync_pipes<AscendC::HardEvent::MTE2_MTE3>();
    new_counts.store(0, p.num_computed_tokens + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_MTE2>();
  }
}

// The tokens, not the requests, are divided among the cores, because one request may have most of the tokens.
template <class Slot>
__aicore__ inline void map_tokens(const ComputeSlotMappingParams& p, const CoreTiling& core_tiling) {
  const auto mapping = (Gm<Slot>)p.slot_mapping;
  // TokenWindow requires a pointer to non-const, because it also has store(). This kernel does not write positions.
  const auto mutable_positions = (Gm<int64_t>)p.positions;
  AscendC::TPipe pipe;
  StagedSlots staged_slots(pipe, p, core_tiling.per_pass);
  TokenWindow<int64_t> positions(pipe, core_tiling.per_pass);
  TokenWindow<Slot> slots(pipe, core_tiling.per_pass);
  staged_slots.load();
  for (int64_t first = first_item(core_tiling); first < p.num_slots; first += pass_stride(core_tiling)) {
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    positions.load(mutable_positions, p.num_positions, first, core_tiling.per_pass);
    slots.load(mapping, p.num_slots, first, core_tiling.per_pass);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    staged_slots.blocks.clear();
    const int64_t begin = find_first_request(staged_slots.query_start_loc, p.batch, first);
    int64_t end = begin;
    for (; end < p.batch && staged_slots.query_start_loc[end] < slots.end(); ++end) {
      load_blocks(p, end, staged_slots, positions, slots);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    int64_t next_block = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p, i, staged_slots, next_block, positions, slots);
    pad_remaining_slots(p, staged_slots, slots);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    slots.store(mapping);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }
}

__aicore__ inline void compute_slot_mapping_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<ComputeSlotMappingParams>(args.params);
  const auto core_tiling = read_as<CoreTiling>(args.tiling);
  if (p.slot_bytes == 8) {
    map_tokens<int64_t>(p, core_tiling);
  } else {
    map_tokens<int32_t>(p, core_tiling);
  }
}

// A pass of entries of seq_lens: one entry per request, then zeros up to the end of the tensor. should_discard_row()
// reads the number of tokens of a row.
class RequestPass : public RequestPassLayout {
 public:
  const int64_t num_rows;
  RandomAccessArray<int32_t> num_tokens;

  __aicore__ inline RequestPass(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, int64_t per_pass)
      : num_rows(p.num_rows),
        num_tokens(pipe, p.num_tokens, p.discard != nullptr ? p.num_rows : 0),
        p_(p),
        counts_(pipe, per_pass),
        seq_lens_(pipe, per_pass),
        discard_(pipe, per_pass) {}

  __aicore__ inline void load(int64_t first, int64_t max_count) {
    first_ = first;
    num_entries_ = smaller(max_count, p_.num_seq_lens - first);
    num_requests_ = larger<int64_t>(smaller(num_entries_, p_.counts.batch - first), 0);
    counts_.load(p_.counts, first, num_requests_);
  }
  __aicore__ inline void correct(const StagedCounts& staged_counts, const StagedSlots& staged_slots) {
    for (int64_t j = 0; j < num_requests_; ++j) {
      const int64_t i = first_ + j;
      const int32_t num_computed = counts_.correct(staged_counts, j);
      const int32_t seq_len = sequence_length(staged_slots.query_start_loc, i, num_computed);
      seq_lens_.set(j, seq_len);
      if (p_.discard != nullptr) discard_.set(j, should_discard_row(*this, staged_slots.row_indices[i], seq_len));
    }
    for (int64_t j = num_requests_; j < num_entries_; ++j) seq_lens_.set(j, 0);
  }
  __aicore__ inline void store(Gm<int32_t> new_counts) {
    counts_.store(p_.counts, new_counts);
    seq_lens_.store(0, p_.seq_lens + first_, num_entries_);
    if (p_.discard != nullptr) discard_.store(0, p_.discard + first_, num_requests_);
  }

 private:
  const CorrectSpecStateParams& p_;
  CountPass counts_;
  LocalBuffer<int32_t> seq_lens_;
  LocalBuffer<uint8_t> discard_;
  int64_t first_ = 0, num_entries_ = 0, num_requests_ = 0;
};

// A core processes a pass of requests and a pass of tokens in the same iteration, so that it waits only once for each
// of the following: the staged arrays, the block ids, and the stores of the results.
template <class Slot>
__aicore__ inline void correct_requests_and_tokens(const CorrectSpecStateParams& p, const BatchTiling& tiling,
                                                   Gm<int32_t> new_counts) {
  const auto mapping = (Gm<Slot>)p.slots.slot_mapping;
  const CoreTiling& core_tiling = tiling.tokens;
  const int64_t tokens = larger(p.slots.num_positions, p.slots.num_slots);
  AscendC::TPipe pipe;
  StagedCounts staged_counts(pipe, p.counts);
  StagedSlots staged_slots(pipe, p.slots, core_tiling.per_pass);
  RequestPass requests(pipe, p, tiling.requests.per_pass);
  TokenWindow<int64_t> positions(pipe, core_tiling.per_pass);
  TokenWindow<Slot> slots(pipe, core_tiling.per_pass);
  staged_slots.load();
  staged_counts.load();
  requests.num_tokens.load();
  int64_t first_entry = first_item(tiling.requests);
  for (int64_t first = first_item(core_tiling); first < tokens || first_entry < p.num_seq_lens;) {
    const int64_t begin_token = smaller(first, tokens);
    const int64_t end_token = smaller(begin_token + core_tiling.per_pass, tokens);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    requests.load(smaller(first_entry, p.num_seq_lens), tiling.requests.per_pass);
    positions.load(p.positions, p.slots.num_positions, begin_token, core_tiling.per_pass);
    slots.load(mapping, p.slots.num_slots, begin_token, core_tiling.per_pass);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    staged_slots.blocks.clear();
    const int64_t begin = find_first_request(staged_slots.query_start_loc, p.slots.batch, begin_token);
    int64_t end = begin;
    for (; end < p.slots.batch && staged_slots.query_start_loc[end] < end_token; ++end) {
      const TokenRange tokens_in_window =
          positions.clip_range(request_token_range(staged_slots.query_start_loc, end, p.slots.num_positions));
      const int32_t start = staged_slots.query_start_loc[end];
      const int32_t num_computed = corrected_counts(staged_counts, end).num_computed;
      for (int64_t n = tokens_in_window.begin; n < tokens_in_window.end; ++n)
        positions.set(n, position_of_token(n, start, num_computed));
      load_blocks(p.slots, end, staged_slots, positions, slots);
    }
    requests.correct(staged_counts, staged_slots);  // while the block ids are loaded
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    int64_t next_block = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p.slots, i, staged_slots, next_block, positions, slots);
    pad_remaining_slots(p.slots, staged_slots, slots);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    requests.store(new_counts);
    positions.store(p.positions);
    slots.store(mapping);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
    if (first < tokens) first += pass_stride(core_tiling);
    if (first_entry < p.num_seq_lens) first_entry += pass_stride(tiling.requests);
  }
}

__aicore__ inline void correct_spec_state_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectSpecStateParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  if (p.slots.slot_bytes == 8) {
    correct_requests_and_tokens<int64_t>(p, tiling, Gm<int32_t>(args.workspace));
  } else {
    correct_requests_and_tokens<int32_t>(p, tiling, Gm<int32_t>(args.workspace));
  }
}

}  // namespace ngram_npu::ascendc

NGRAM_NPU_KERNEL(ngram_npu_correct_num_computed_tokens, ngram_npu::ascendc::correct_num_computed_tokens_kernel)
NGRAM_NPU_KERNEL(ngram_npu_copy_num_computed_tokens, ngram_npu::ascendc::copy_num_computed_tokens_kernel)
NGRAM_NPU_KERNEL(ngram_npu_compute_slot_mapping, ngram_npu::ascendc::compute_slot_mapping_kernel)
NGRAM_NPU_KERNEL(ngram_npu_correct_spec_state, ngram_npu::ascendc::correct_spec_state_kernel)
