// AscendC kernels of the operators that correct counts, positions and slots between forward passes. plans.h plans their
// launches.
#include "core/correction.h"

#include "ascendc/counts.h"
#include "ascendc/slots.h"

namespace ngram_npu::ascendc {

__aicore__ inline void correct_num_computed_tokens_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<CorrectNumComputedTokensParams>(args.params);
  const CoreTiling core_tiling = read_as<BatchTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  PreviousCounts previous_counts(pipe, p);
  CountCorrector corrector(pipe, p, core_tiling.per_pass);
  previous_counts.load();
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    corrector.load(p, first, smaller(core_tiling.per_pass, p.batch - first));
    corrector.load_accepted(p);
    sync_pipes<AscendC::HardEvent::MTE2_V>();
    corrector.correct(previous_counts);
    sync_pipes<AscendC::HardEvent::V_MTE3>();
    corrector.store(p, Gm<int32_t>(args.workspace));
    sync_pipes<AscendC::HardEvent::MTE3_MTE2>();
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

// Processes a pass of entries of seq_lens: one entry per request, then zeros up to the end of the tensor. The next
// launch writes the corrected counts, because all cores of this launch read the old counts.
class RequestPass : public RequestPassLayout {
 public:
  __aicore__ inline RequestPass(AscendC::TPipe& pipe, const CorrectSpecStateParams& p, int64_t per_pass)
      : p_(p),
        corrector_(pipe, p.counts, per_pass),
        row_indices_(pipe, p.slots.row_indices, per_pass),
        gather_offsets_(pipe, per_pass),
        num_tokens_(pipe, p.num_tokens, p.discard != nullptr ? p.num_rows : 0),
        begins_(pipe, per_pass),
        ends_(pipe, per_pass),
        seq_lens_(pipe, per_pass),
        discard_int32_(pipe, per_pass),
        discard_half_(pipe, per_pass),
        discard_uint8_(pipe, per_pass) {}

  __aicore__ inline void load_num_tokens() { num_tokens_.load(); }
  __aicore__ inline void load(int64_t first, int64_t max_count) {
    first_ = first;
    num_entries_ = smaller(max_count, p_.num_seq_lens - first);
    num_requests_ = larger<int64_t>(smaller(num_entries_, p_.counts.batch - first), 0);
    corrector_.load(p_.counts, first, num_requests_);
    corrector_.load_accepted(p_.counts);
    begins_.load(0, p_.slots.query_start_loc + first, num_requests_);
    ends_.load(0, p_.slots.query_start_loc + first + 1, num_requests_);
    if (p_.discard != nullptr) row_indices_.load(first, num_requests_);
  }

  __aicore__ inline void correct(PreviousCounts& previous_counts) {
    const auto n = static_cast<int32_t>(num_requests_);
    const Ints& seq_lens = seq_lens_.tensor();
    if (num_entries_ > n) AscendC::Duplicate(seq_lens, 0, static_cast<int32_t>(num_entries_));
    if (n == 0) return;
    corrector_.correct(previous_counts);
    AscendC::Sub(seq_lens, ends_.tensor(), begins_.tensor(), n);
    AscendC::Add(seq_lens, seq_lens, corrector_.num_computed(), n);
    if (p_.discard != nullptr) compute_discard_flags(seq_lens, n);
  }

  __aicore__ inline void store(Gm<int32_t> new_counts) {
    corrector_.store(p_.counts, new_counts);
    seq_lens_.store(0, p_.seq_lens + first_, num_entries_);
    if (p_.discard != nullptr) discard_uint8_.store(0, p_.discard + first_, num_requests_);
  }

 private:
  // A vector version of should_discard_row(), which reuses the buffers of the requests' begins and ends.
  __aicore__ inline void compute_discard_flags(const Ints& seq_lens, int32_t n) {
    const Ints& indices = row_indices_.convert(n);
    const Ints& missing = ends_.tensor();  // num_tokens at first; after Sub, the known tokens after the step's end
    const Ints& known_in_step = begins_.tensor();
    const Ints& discards = discard_int32_.tensor();
    AscendC::Duplicate(discards, 1, n);
    for (int64_t first = 0; first < num_tokens_.size; first += kMaxStagedItems) {
      gather_offsets_.compute(indices, first, num_tokens_.size, n);
      num_tokens_.gather(missing, gather_offsets_, n);
      AscendC::Min(known_in_step, missing, seq_lens, n);
      AscendC::Sub(missing, missing, known_in_step, n);
      convert_to_flags(missing, n);
      select(discards, missing, gather_offsets_.range_flags(), n);
    }
    const auto mode = AscendC::RoundMode::CAST_RINT;  // the 950 does not support CAST_NONE for these conversions
    const auto floats = discards.template ReinterpretCast<float>();
    AscendC::Cast(floats, discards, mode, static_cast<uint32_t>(n));
    AscendC::Cast(discard_half_.tensor(), floats, mode, static_cast<uint32_t>(n));
    AscendC::Cast(discard_uint8_.tensor(), discard_half_.tensor(), mode, static_cast<uint32_t>(n));
  }

  const CorrectSpecStateParams& p_;
  CountCorrector corrector_;
  PassIndices row_indices_;
  GatherOffsets gather_offsets_;
  GatherSource num_tokens_;
  LocalBuffer<int32_t> begins_, ends_, seq_lens_, discard_int32_;
  LocalBuffer<half> discard_half_;
  LocalBuffer<uint8_t> discard_uint8_;
  int64_t first_ = 0, num_entries_ = 0, num_requests_ = 0;
};

// Corrects the counts of the requests to which a pass of tokens belongs. To find these requests, the kernel must wait
// for the load of query_start_loc. If the batch has at most kMaxCorrectedRequests requests, the kernel corrects all of
// them instead, because a second wait would take longer.
class TokenPassCounts : public TokenPassCountsLayout {
 public:
  __aicore__ inline TokenPassCounts(AscendC::TPipe& pipe, const CorrectNumComputedTokensParams& p)
      : p_(p), corrector_(pipe, p, max_requests(p)) {}

  __aicore__ inline void load_all_if_few() {
    if (p_.batch <= kMaxCorrectedRequests) load(0);
  }
  __aicore__ inline int32_t correct_and_get_num_computed(int64_t i, PreviousCounts& previous_counts) {
    if (!corrector_.has(i)) {
      sync_pipes<AscendC::HardEvent::S_MTE2>();
      load(i);
      sync_pipes<AscendC::HardEvent::MTE2_V>();
    }
    if (!is_corrected_) {
      corrector_.correct(previous_counts);
      sync_pipes<AscendC::HardEvent::V_S>();
      is_corrected_ = true;
    }
    return corrector_.num_computed(i);
  }

 private:
  __aicore__ inline void load(int64_t first) {
    is_corrected_ = false;
    corrector_.load(p_, first, smaller(kMaxCorrectedRequests, p_.batch - first));
  }

  const CorrectNumComputedTokensParams& p_;
  CountCorrector corrector_;
  bool is_corrected_ = false;
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
  PreviousCounts previous_counts(pipe, p.counts);
  StagedSlots staged_slots(pipe, p.slots, core_tiling.per_pass);
  RequestPass requests(pipe, p, tiling.requests.per_pass);
  TokenPassCounts counts(pipe, p.counts);
  TokenWindow<int64_t> positions(pipe, core_tiling.per_pass);
  TokenWindow<Slot> slots(pipe, core_tiling.per_pass);
  staged_slots.load();
  previous_counts.load();
  counts.load_all_if_few();
  requests.load_num_tokens();
  int64_t first_entry = first_item(tiling.requests);
  for (int64_t first = first_item(core_tiling); first < tokens || first_entry < p.num_seq_lens;) {
    const int64_t begin_token = smaller(first, tokens);
    const int64_t end_token = smaller(begin_token + core_tiling.per_pass, tokens);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    requests.load(smaller(first_entry, p.num_seq_lens), tiling.requests.per_pass);
    positions.load(p.positions, p.slots.num_positions, begin_token, core_tiling.per_pass);
    slots.load(mapping, p.slots.num_slots, begin_token, core_tiling.per_pass);
    // This wait also orders vector instructions after the loads, because the scalar unit issues them after this wait.
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    staged_slots.blocks.clear();
    const int64_t begin = find_first_request(staged_slots.query_start_loc, p.slots.batch, begin_token);
    int64_t end = begin;
    for (; end < p.slots.batch && staged_slots.query_start_loc[end] < end_token; ++end) {
      const TokenRange tokens_in_window =
          positions.clip_range(request_token_range(staged_slots.query_start_loc, end, p.slots.num_positions));
      const int32_t start = staged_slots.query_start_loc[end];
      const int32_t num_computed = counts.correct_and_get_num_computed(end, previous_counts);
      for (int64_t n = tokens_in_window.begin; n < tokens_in_window.end; ++n)
        positions.set(n, position_of_token(n, start, num_computed));
      load_blocks(p.slots, end, staged_slots, positions, slots);
    }
    requests.correct(previous_counts);  // while the block ids are loaded
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    int64_t next_block = 0;
    for (int64_t i = begin; i < end; ++i) map_request(p.slots, i, staged_slots, next_block, positions, slots);
    pad_remaining_slots(p.slots, staged_slots, slots);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    sync_pipes<AscendC::HardEvent::V_MTE3>();
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
