// AscendC kernels of the operators for sampled tokens and for a drafter's batch, launched by plans.h.
#include "core/bookkeeping.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// The rows of sampled tokens of a pass of requests, each at a multiple of 32 bytes.
class SampledRows {
 public:
  struct Row {
    const Local<int32_t>& rows;
    int64_t at;
    __aicore__ inline int32_t operator[](int64_t t) const { return rows.get(at + t); }
  };

  __aicore__ inline SampledRows(AscendC::TPipe& pipe, int64_t per_pass) : rows_(pipe, per_pass * kTokenPlace) {}

  __aicore__ inline void load(const TokenRows<const int32_t>& sampled, int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; ++j) rows_.load(j * kTokenPlace, sampled[first + j], sampled.capacity);
  }
  __aicore__ inline Row operator[](int64_t j) const { return {rows_, j * kTokenPlace}; }

 private:
  Local<int32_t> rows_;
};

__aicore__ inline void prepare_next_token_ids_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareNextTokenIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  SampledRows sampled(pipe, share.per_pass);
  InUb<uint8_t> discard(pipe, p.discard, share.per_pass);
  Local<int32_t> tokens(pipe, share.per_pass);
  Local<int32_t> num_sampled(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    order<AscendC::HardEvent::S_MTE2>();
    sampled.load(p.sampled_token_ids, first, count);
    if (p.discard != nullptr) discard.load(first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const bool discarded = p.discard != nullptr && discard[first + j] != 0;
      const NextToken next = next_token(p, first + j, sampled[j], discarded);
      tokens.set(j, next.token);
      num_sampled.set(j, next.num_sampled);
    }
    order<AscendC::HardEvent::S_MTE3>();
    tokens.store(0, p.next_token_ids + first, count);
    num_sampled.store(0, p.num_sampled + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

// The inputs of PrepareInputsPaddedParams for a pass of requests, under their names.
struct StagedBatch {
  InUb<int32_t> cu_num_draft_tokens, num_sampled, query_start_loc;

  __aicore__ inline void load(int64_t first, int64_t count) {
    const int64_t before = first > 0 ? 1 : 0;
    cu_num_draft_tokens.load(first - before, count + before);
    num_sampled.load(first, count);
    query_start_loc.load(first, count + 1);
  }
};

__aicore__ inline void prepare_inputs_padded_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsPaddedParams>(args.params);
  const Shares share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  StagedBatch batch{{pipe, p.cu_num_draft_tokens, share.per_pass + 1},
                    {pipe, p.num_sampled, share.per_pass},
                    {pipe, p.query_start_loc, share.per_pass + 1}};
  Local<int32_t> indices(pipe, share.per_pass);
  Local<int32_t> rejected(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    order<AscendC::HardEvent::S_MTE2>();
    batch.load(first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int32_t drafts_rejected = rejected_of(batch, first + j);
      rejected.set(j, drafts_rejected);
      indices.set(j, index_to_sample(batch, first + j, drafts_rejected));
    }
    order<AscendC::HardEvent::S_MTE3>();
    rejected.store(0, p.num_rejected + first, count);
    indices.store(0, p.token_indices_to_sample + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

// The numbers of tokens that each request of a stretch keeps and drops: a vector version of kept_tokens().
class KeptStretch {
 public:
  __aicore__ inline explicit KeptStretch(AscendC::TPipe& pipe)
      : starts_(pipe, kStretch), kept_(pipe, kStretch), rejected_(pipe, kStretch) {}

  __aicore__ inline void load(const PrepareInputsParams& p, int64_t first) {
    first_ = first;
    const int64_t count = smaller(kStretch, p.batch - first);
    if (count <= 0) return;
    if (first > 0) order<AscendC::HardEvent::S_MTE2>();
    starts_.load(0, p.query_start_loc + first, count);
    kept_.load(0, p.query_start_loc + first + 1, count);  // the requests' ends
    rejected_.load(0, p.num_rejected + first, count);
    order<AscendC::HardEvent::MTE2_V>();
    const auto& kept = kept_.tensor();
    const auto& rejected = rejected_.tensor();
    const auto n = static_cast<int32_t>(count);
    AscendC::Sub(kept, kept, starts_.tensor(), n);
    AscendC::Maxs(kept, kept, 0, n);
    AscendC::Maxs(rejected, rejected, 0, n);
    AscendC::Min(rejected, rejected, kept, n);
    AscendC::Sub(kept, kept, rejected, n);
    order<AscendC::HardEvent::V_S>();
  }

  __aicore__ inline bool has(int64_t i) const { return i < first_ + kStretch; }
  __aicore__ inline int32_t start(int64_t i) const { return starts_.get(i - first_); }
  __aicore__ inline int32_t kept(int64_t i) const { return kept_.get(i - first_); }
  __aicore__ inline int32_t rejected(int64_t i) const { return rejected_.get(i - first_); }
  // The tokens that requests i and i + 1 keep together, read with one load; i is even.
  __aicore__ inline int64_t kept_by_two(int64_t i) const {
    const auto pairs = kept_.tensor().ReinterpretCast<uint64_t>();
    const uint64_t both = pairs.GetValue(static_cast<uint32_t>((i - first_) / 2));
    return static_cast<int64_t>((both & UINT32_MAX) + (both >> 32));
  }

 private:
  Local<int32_t> starts_, kept_, rejected_;
  int64_t first_ = 0;
};

// Items [begin, end) of a pass, staged.
struct Pass {
  int64_t begin, end;

  __aicore__ inline Pass(const Shares& share, int64_t first, int64_t size)
      : begin(smaller(first, size)), end(smaller(begin + share.per_pass, size)) {}
  __aicore__ inline bool has(int64_t i) const { return begin <= i && i < end; }
  // Whether the pass has none of the items [first, last).
  __aicore__ inline bool excludes(int64_t first, int64_t last) const { return last <= begin || end <= first; }
};

// The place of a request's kept tokens depends on all earlier requests. So every core counts the kept tokens up to its
// own part of query_start_loc_out, whose last item is not a request, and up to its own part of token_indices.
__aicore__ inline void prepare_inputs_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  AscendC::TPipe pipe;
  KeptStretch stretch(pipe);
  InUb<int32_t> seq_lens(pipe, p.seq_lens, tiling.requests.per_pass);
  Local<int32_t> starts(pipe, tiling.requests.per_pass);
  Local<int32_t> lengths(pipe, tiling.requests.per_pass);
  Local<int32_t> indices(pipe, larger<int64_t>(tiling.tokens.per_pass, 1));
  int64_t request = first_item(tiling.requests);
  int64_t token = first_item(tiling.tokens);
  while (request <= p.batch || token < p.total_tokens) {
    const Pass requests(tiling.requests, request, p.batch + 1);
    const Pass tokens(tiling.tokens, token, p.total_tokens);
    order<AscendC::HardEvent::S_MTE2>();
    seq_lens.load(requests.begin, smaller(requests.end, p.batch) - requests.begin);
    stretch.load(p, 0);
    int32_t kept_before = 0;
    int64_t written = 0;
    for (int64_t i = 0; i < p.batch && (i < requests.end || written < tokens.end); ++i) {
      if (!stretch.has(i)) stretch.load(p, i);
      if (i % 2 == 0 && i + 1 < p.batch && requests.excludes(i, i + 2)) {
        const int64_t both = stretch.kept_by_two(i);
        if (tokens.excludes(written, written + both)) {
          kept_before = wrap_add(kept_before, static_cast<int32_t>(both));
          written += both;
          ++i;
          continue;
        }
      }
      const int32_t kept = stretch.kept(i);
      if (requests.has(i)) {
        starts.set(i - requests.begin, kept_before);
        lengths.set(i - requests.begin, wrap_sub(seq_lens[i], stretch.rejected(i)));
      }
      const int64_t upto = smaller(tokens.end, written + kept);
      for (int64_t n = larger(tokens.begin, written); n < upto; ++n) {
        indices.set(n - tokens.begin, wrap_add(stretch.start(i), static_cast<int32_t>(n - written)));
      }
      kept_before = wrap_add(kept_before, kept);
      written += kept;
    }
    if (requests.has(p.batch)) starts.set(p.batch - requests.begin, kept_before);
    for (int64_t n = larger(tokens.begin, written); n < tokens.end; ++n) indices.set(n - tokens.begin, kNoToken);
    order<AscendC::HardEvent::S_MTE3>();
    starts.store(0, p.query_start_loc_out + requests.begin, requests.end - requests.begin);
    lengths.store(0, p.seq_lens_out + requests.begin, smaller(requests.end, p.batch) - requests.begin);
    indices.store(0, p.token_indices + tokens.begin, tokens.end - tokens.begin);
    order<AscendC::HardEvent::MTE3_S>();
    if (request <= p.batch) request += items_between(tiling.requests);
    if (token < p.total_tokens) token += items_between(tiling.tokens);
  }
}

// The arrays that prepare_input_ids_ reads for a pass of requests, under the names of its parameters. A request's
// newest token and drafts are loaded after their places are known. Of a row of drafts at most kMaxDraftTokens are
// staged; the rest is read from global memory.
class StagedInputs {
 public:
  struct Row {
    const Local<int32_t>& drafts;
    int64_t at, staged;
    Gm<const int32_t> rest;
    __aicore__ inline int32_t operator[](int64_t j) const { return j < staged ? drafts.get(at + j) : rest[j]; }
  };
  struct Rows {
    int64_t capacity;
    const StagedInputs& inputs;
    __aicore__ inline Row operator[](int64_t prev) const {
      return {inputs.drafts_, inputs.request_ * inputs.row_place_, inputs.row_staged_, inputs.rows_[prev]};
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
        row_staged_(smaller(p.draft_token_ids.capacity, kMaxDraftTokens)),
        row_place_((row_staged_ + kPlace - 1) / kPlace * kPlace),
        drafts_(pipe, larger<int64_t>(per_pass * row_place_, 1)) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    query_start_loc.load(first, count + 1);
    num_scheduled_drafts.load(first, count);
  }
  __aicore__ inline void ask(int64_t j, int64_t prev) { drafts_.load(j * row_place_, rows_[prev], row_staged_); }
  // Selects the request; the rules read its drafts.
  __aicore__ inline void select(int64_t j) { request_ = j; }

  const int64_t num_inputs;
  const int32_t pad_token;
  InUb<int32_t> query_start_loc, num_scheduled_drafts;
  WholeIndices prev_positions;
  Whole<int32_t> next_token_ids;
  const Rows draft_token_ids;

 private:
  static constexpr int64_t kPlace = 8;  // 32 bytes
  const TokenRows<const int32_t> rows_;
  const int64_t row_staged_, row_place_;
  Local<int32_t> drafts_;
  int64_t request_ = 0;
};

// Pieces are written from several places cyclically, so that none waits for the previous one. A request's span may need
// several pieces, since its length may be any number.
class Pieces {
 public:
  __aicore__ inline explicit Pieces(AscendC::TPipe& pipe) : ids_(pipe, kInputPieces * kInputPiece) {}

  __aicore__ inline void write(const StagedInputs& inputs, Gm<int32_t> input_ids, int64_t i, int64_t prev) {
    const InputSpan span = input_span(inputs, i);
    for (int64_t first = span.begin; first < span.end; first += kInputPiece) {
      const int64_t count = smaller(kInputPiece, span.end - first);
      for (int64_t j = 0; j < count; ++j) ids_.set(place_ + j, input_id(inputs, span, prev, first + j));
      order<AscendC::HardEvent::S_MTE3>();
      ids_.store(place_, input_ids + first, count);
      place_ += kInputPiece;
      if (place_ < kInputPieces * kInputPiece) continue;
      order<AscendC::HardEvent::MTE3_S>();
      place_ = 0;
    }
  }

 private:
  Local<int32_t> ids_;
  int64_t place_ = 0;
};

__aicore__ inline void prepare_input_ids_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  StagedInputs inputs(pipe, p, share.per_pass);
  Pieces pieces(pipe);
  inputs.prev_positions.load();
  inputs.next_token_ids.load();
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    order<AscendC::HardEvent::S_MTE2>();
    inputs.load(first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int64_t prev = inputs.prev_positions[first + j];
      if (p.draft_token_ids.has(prev)) inputs.ask(j, prev);
    }
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int64_t prev = inputs.prev_positions[first + j];
      if (!p.draft_token_ids.has(prev)) continue;
      inputs.select(j);
      pieces.write(inputs, p.input_ids, first + j, prev);
    }
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_prepare_next_token_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_next_token_ids_kernel(args);
}

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs_padded(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_inputs_padded_kernel(args);
}

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_inputs_kernel(args);
}

extern "C" __global__ __aicore__ void ngram_npu_prepare_input_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_input_ids_kernel(args);
}
