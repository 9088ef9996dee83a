#include "core/prepare_input_ids.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

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
    const StagedInputs& of;
    __aicore__ inline Row operator[](int64_t prev) const {
      return {of.drafts_, of.request_ * of.row_place_, of.row_staged_, of.rows_[prev]};
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
  // Selects the request whose drafts the rules read.
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

// Pieces are written from several places in turn, so that none waits for the previous one. A request's span may need
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

extern "C" __global__ __aicore__ void ngram_npu_prepare_input_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_input_ids_kernel(args);
}
