// AscendC kernels of the operators that process sampled tokens and prepare the drafter's batch. plans.h plans their
// launches.
#include "core/bookkeeping.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

__aicore__ inline void prepare_next_token_ids_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareNextTokenIdsParams>(args.params);
  const auto core_tiling = read_as<CoreTiling>(args.tiling);
  AscendC::TPipe pipe;
  LocalBuffer<int32_t> sampled(pipe, core_tiling.per_pass * kSampledTokensStride);
  UbWindow<uint8_t> discard(pipe, p.discard, core_tiling.per_pass);
  LocalBuffer<int32_t> tokens(pipe, core_tiling.per_pass);
  LocalBuffer<int32_t> num_sampled(pipe, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    for (int64_t j = 0; j < count; ++j)
      sampled.load(j * kSampledTokensStride, p.sampled_token_ids[first + j], p.sampled_token_ids.capacity);
    if (p.discard != nullptr) discard.load(first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const bool discarded = p.discard != nullptr && discard[first + j] != 0;
      const NextToken next = next_token(p, first + j, UbWords{sampled, j * kSampledTokensStride}, discarded);
      tokens.set(j, next.token);
      num_sampled.set(j, next.num_sampled);
    }
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    tokens.store(0, p.next_token_ids + first, count);
    num_sampled.store(0, p.num_sampled + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }
}

// The inputs of PrepareInputsPaddedParams for one pass of requests, with the same member names, so that the functions
// in core/ accept it.
struct StagedBatch : StagedBatchLayout {
  __aicore__ inline StagedBatch(AscendC::TPipe& pipe, const PrepareInputsPaddedParams& p, int64_t per_pass)
      : cu_num_draft_tokens(pipe, p.cu_num_draft_tokens, per_pass + 1),
        num_sampled(pipe, p.num_sampled, per_pass),
        query_start_loc(pipe, p.query_start_loc, per_pass + 1) {}

  UbWindow<int32_t> cu_num_draft_tokens, num_sampled, query_start_loc;

  __aicore__ inline void load(int64_t first, int64_t count) {
    const int64_t num_earlier = first > 0 ? 1 : 0;  // the cumulative sum of the request before the pass
    cu_num_draft_tokens.load(first - num_earlier, count + num_earlier);
    num_sampled.load(first, count);
    query_start_loc.load(first, count + 1);
  }
};

__aicore__ inline void prepare_inputs_padded_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsPaddedParams>(args.params);
  const CoreTiling core_tiling = read_as<CoreTiling>(args.tiling);
  AscendC::TPipe pipe;
  StagedBatch batch(pipe, p, core_tiling.per_pass);
  LocalBuffer<int32_t> indices(pipe, core_tiling.per_pass);
  LocalBuffer<int32_t> rejected_counts(pipe, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    batch.load(first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int32_t num_rejected = count_rejected_drafts(batch, first + j);
      rejected_counts.set(j, num_rejected);
      indices.set(j, index_to_sample(batch, first + j, num_rejected));
    }
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    rejected_counts.store(0, p.num_rejected + first, count);
    indices.store(0, p.token_indices_to_sample + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }
}

// Numbers of kept and rejected tokens of up to kRequestsPerTile consecutive requests, computed by a vector version of
// count_kept_tokens().
class KeptTokensTile : public KeptTokensTileLayout {
 public:
  __aicore__ inline explicit KeptTokensTile(AscendC::TPipe& pipe)
      : starts_(pipe, kRequestsPerTile), num_kept_(pipe, kRequestsPerTile), num_rejected_(pipe, kRequestsPerTile) {}

  __aicore__ inline void load(const PrepareInputsParams& p, int64_t first) {
    first_ = first;
    const int64_t count = smaller(kRequestsPerTile, p.batch - first);
    if (count <= 0) return;
    if (first > 0) sync_pipes<AscendC::HardEvent::S_MTE2>();
    starts_.load(0, p.query_start_loc + first, count);
    num_kept_.load(0, p.query_start_loc + first + 1, count);  // the requests' ends
    num_rejected_.load(0, p.num_rejected + first, count);
    sync_pipes<AscendC::HardEvent::MTE2_V>();
    const auto& num_kept = num_kept_.tensor();
    const auto& num_rejected = num_rejected_.tensor();
    const auto n = static_cast<int32_t>(count);
    AscendC::Sub(num_kept, num_kept, starts_.tensor(), n);
    AscendC::Maxs(num_kept, num_kept, 0, n);
    AscendC::Maxs(num_rejected, num_rejected, 0, n);
    AscendC::Min(num_rejected, num_rejected, num_kept, n);
    AscendC::Sub(num_kept, num_kept, num_rejected, n);
    sync_pipes<AscendC::HardEvent::V_S>();
  }

  __aicore__ inline bool has(int64_t i) const { return i < first_ + kRequestsPerTile; }
  __aicore__ inline int32_t start(int64_t i) const { return starts_.get(i - first_); }
  __aicore__ inline int32_t num_kept(int64_t i) const { return num_kept_.get(i - first_); }
  __aicore__ inline int32_t num_rejected(int64_t i) const { return num_rejected_.get(i - first_); }
  // Returns the number of tokens that requests i and i + 1 keep together, read with one load; i is even.
  __aicore__ inline int64_t num_kept_in_pair(int64_t i) const {
    const auto pairs = num_kept_.tensor().ReinterpretCast<uint64_t>();
    const uint64_t pair = pairs.GetValue(static_cast<uint32_t>((i - first_) / 2));
    return static_cast<int64_t>((pair & UINT32_MAX) + (pair >> 32));
  }

 private:
  LocalBuffer<int32_t> starts_, num_kept_, num_rejected_;
  int64_t first_ = 0;
};

// Items [begin, end) of a pass.
struct PassRange {
  int64_t begin, end;

  __aicore__ inline PassRange(const CoreTiling& core_tiling, int64_t first, int64_t size)
      : begin(smaller(first, size)), end(smaller(begin + core_tiling.per_pass, size)) {}
  __aicore__ inline bool has(int64_t i) const { return begin <= i && i < end; }
  // Whether [first, stop) does not overlap the pass.
  __aicore__ inline bool is_disjoint_from(int64_t first, int64_t stop) const { return stop <= begin || end <= first; }
};

// The output offset of a request is the sum of the kept tokens of all earlier requests. Every core therefore recomputes
// this prefix sum up to its part of query_start_loc_out (B + 1 items) and its part of token_indices.
__aicore__ inline void prepare_inputs_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  AscendC::TPipe pipe;
  KeptTokensTile kept_tokens_tile(pipe);
  UbWindow<int32_t> seq_lens(pipe, p.seq_lens, tiling.requests.per_pass);
  LocalBuffer<int32_t> starts(pipe, tiling.requests.per_pass);
  LocalBuffer<int32_t> lengths(pipe, tiling.requests.per_pass);
  LocalBuffer<int32_t> indices(pipe, tiling.tokens.per_pass);
  int64_t request = first_item(tiling.requests);
  int64_t token = first_item(tiling.tokens);
  while (request <= p.batch || token < p.total_tokens) {
    const PassRange requests(tiling.requests, request, p.batch + 1);
    const PassRange tokens(tiling.tokens, token, p.total_tokens);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    seq_lens.load(requests.begin, smaller(requests.end, p.batch) - requests.begin);
    kept_tokens_tile.load(p, 0);
    int64_t kept_before = 0;  // number of tokens that the requests before request i keep
    int32_t start = 0;        // its low 32 bits: the start of request i in the output
    for (int64_t i = 0; i < p.batch && (i < requests.end || kept_before < tokens.end); ++i) {
      if (!kept_tokens_tile.has(i)) kept_tokens_tile.load(p, i);
      if (i % 2 == 0 && i + 1 < p.batch && requests.is_disjoint_from(i, i + 2)) {
        const int64_t num_kept = kept_tokens_tile.num_kept_in_pair(i);
        if (tokens.is_disjoint_from(kept_before, kept_before + num_kept)) {
          start = wrap_add(start, static_cast<int32_t>(num_kept));
          kept_before += num_kept;
          ++i;
          continue;
        }
      }
      const int32_t num_kept = kept_tokens_tile.num_kept(i);
      if (requests.has(i)) {
        starts.set(i - requests.begin, start);
        lengths.set(i - requests.begin, wrap_sub(seq_lens[i], kept_tokens_tile.num_rejected(i)));
      }
      const int64_t write_end = smaller(tokens.end, kept_before + num_kept);
      for (int64_t n = larger(tokens.begin, kept_before); n < write_end; ++n) {
        indices.set(n - tokens.begin, wrap_add(kept_tokens_tile.start(i), static_cast<int32_t>(n - kept_before)));
      }
      start = wrap_add(start, num_kept);
      kept_before += num_kept;
    }
    if (requests.has(p.batch)) starts.set(p.batch - requests.begin, start);
    for (int64_t n = larger(tokens.begin, kept_before); n < tokens.end; ++n) indices.set(n - tokens.begin, kNoToken);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    starts.store(0, p.query_start_loc_out + requests.begin, requests.end - requests.begin);
    lengths.store(0, p.seq_lens_out + requests.begin, smaller(requests.end, p.batch) - requests.begin);
    indices.store(0, p.token_indices + tokens.begin, tokens.end - tokens.begin);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
    if (request <= p.batch) request += pass_stride(tiling.requests);
    if (token < p.total_tokens) token += pass_stride(tiling.tokens);
  }
}

// The arrays that prepare_input_ids_ reads for one pass of requests, with the same member names as the parameters. The
// drafts are loaded after prev_positions has been read. At most kMaxDraftTokens draft tokens per row are staged;
// further tokens are read from global memory. Rows[prev_position] must be the row of the selected request.
class StagedInputs : public StagedInputsLayout {
 public:
  struct Row {
    const LocalBuffer<int32_t>& drafts;
    int64_t offset, num_staged;
    Gm<const int32_t> row;  // in global memory
    __aicore__ inline int32_t operator[](int64_t j) const { return j < num_staged ? drafts.get(offset + j) : row[j]; }
  };
  struct Rows {
    int64_t capacity;
    const StagedInputs& inputs;
    __aicore__ inline Row operator[](int64_t prev_position) const {
      return {inputs.drafts_, inputs.request_ * inputs.row_stride_, inputs.num_staged_, inputs.rows_[prev_position]};
    }
  };
  __aicore__ inline StagedInputs(AscendC::TPipe& pipe, const PrepareInputIdsParams& p, int64_t per_pass)
      : num_inputs(p.num_inputs),
        pad_token(p.pad_token),
        query_start_loc(pipe, p.query_start_loc, per_pass + 1),
        num_scheduled_drafts(pipe, p.num_scheduled_drafts, per_pass),
        prev_positions(pipe, p.prev_positions, p.batch),
        next_token_ids(pipe, p.next_token_ids, p.draft_token_ids.rows),
        draft_token_ids{p.draft_token_ids.capacity, *this},
        rows_(p.draft_token_ids),
        num_staged_(smaller(p.draft_token_ids.capacity, kMaxDraftTokens)),
        row_stride_(round_up_items<int32_t>(num_staged_)),
        drafts_(pipe, per_pass * row_stride_) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    query_start_loc.load(first, count + 1);
    num_scheduled_drafts.load(first, count);
  }
  __aicore__ inline void load_drafts(int64_t j, int64_t prev_position) {
    drafts_.load(j * row_stride_, rows_[prev_position], num_staged_);
  }
  // Selects the request, by its index in the pass, whose drafts input_id() reads.
  __aicore__ inline void select_request(int64_t j) { request_ = j; }

  const int64_t num_inputs;
  const int32_t pad_token;
  UbWindow<int32_t> query_start_loc, num_scheduled_drafts;
  RandomAccessIndices prev_positions;
  RandomAccessArray<int32_t> next_token_ids;
  const Rows draft_token_ids;

 private:
  const TokenRows<const int32_t> rows_;
  const int64_t num_staged_, row_stride_;
  LocalBuffer<int32_t> drafts_;
  int64_t request_ = 0;
};

// Copies input ids to global memory in pieces of kInputIdsPerCopy, through a ring of kCopiesPerWait buffers, so that a
// copy does not wait for the previous copy. A request may have any number of tokens, so it may need several pieces.
class InputIdWriter : public InputIdWriterLayout {
 public:
  __aicore__ inline explicit InputIdWriter(AscendC::TPipe& pipe) : ids_(pipe, kCopiesPerWait * kInputIdsPerCopy) {}

  __aicore__ inline void write(const StagedInputs& inputs, Gm<int32_t> input_ids, int64_t i, int64_t prev_position) {
    const InputSpan span = input_span(inputs, i);
    for (int64_t first = span.begin; first < span.end; first += kInputIdsPerCopy) {
      const int64_t count = smaller(kInputIdsPerCopy, span.end - first);
      for (int64_t j = 0; j < count; ++j) ids_.set(offset_ + j, input_id(inputs, span, prev_position, first + j));
      sync_pipes<AscendC::HardEvent::S_MTE3>();
      ids_.store(offset_, input_ids + first, count);
      offset_ += kInputIdsPerCopy;
      if (offset_ < kCopiesPerWait * kInputIdsPerCopy) continue;
      sync_pipes<AscendC::HardEvent::MTE3_S>();
      offset_ = 0;
    }
  }

 private:
  LocalBuffer<int32_t> ids_;
  int64_t offset_ = 0;
};

__aicore__ inline void prepare_input_ids_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputIdsParams>(args.params);
  const auto core_tiling = read_as<CoreTiling>(args.tiling);
  AscendC::TPipe pipe;
  StagedInputs inputs(pipe, p, core_tiling.per_pass);
  InputIdWriter writer(pipe);
  inputs.prev_positions.load();
  inputs.next_token_ids.load();
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    inputs.load(first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int64_t prev_position = inputs.prev_positions[first + j];
      if (p.draft_token_ids.has(prev_position)) inputs.load_drafts(j, prev_position);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int64_t prev_position = inputs.prev_positions[first + j];
      if (!p.draft_token_ids.has(prev_position)) continue;
      inputs.select_request(j);
      writer.write(inputs, p.input_ids, first + j, prev_position);
    }
  }
}

}  // namespace ngram_npu::ascendc

NGRAM_NPU_KERNEL(ngram_npu_prepare_next_token_ids, ngram_npu::ascendc::prepare_next_token_ids_kernel)
NGRAM_NPU_KERNEL(ngram_npu_prepare_inputs_padded, ngram_npu::ascendc::prepare_inputs_padded_kernel)
NGRAM_NPU_KERNEL(ngram_npu_prepare_inputs, ngram_npu::ascendc::prepare_inputs_kernel)
NGRAM_NPU_KERNEL(ngram_npu_prepare_input_ids, ngram_npu::ascendc::prepare_input_ids_kernel)
