// AscendC kernels of the drafting operators. plans.h plans their launches.
#include "core/drafting.h"

#include "ascendc/lookup.h"

namespace ngram_npu::ascendc {

template <>
__aicore__ inline UpdatedRow updated_row(const NgramProposeParams& p, int64_t i) {
  const RequestRow row = request_row(p, i);
  if (!may_draft(row.length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[row.row], row.length, nullptr, row.length};
}

template <>
class Results<NgramProposeParams> : public ResultsLayout<NgramProposeParams> {
 public:
  __aicore__ inline Results(AscendC::TPipe& pipe, int64_t per_pass, const NgramProposeParams& p)
      : drafter_(pipe, per_pass, p) {}

  __aicore__ inline void prepare(const NgramProposeParams& p, int64_t i, int64_t j) {
    rows_[j] = updated_row(p, i);
    padding_tokens_[j] = padding_token(p, i);
  }
  template <class GetBestMatch>
  __aicore__ inline void add(const NgramProposeParams&, int64_t, int64_t j, const GetBestMatch& get_best_match) {
    drafter_.draft(j, rows_[j], get_best_match, padding_tokens_[j]);
  }
  __aicore__ inline void store(const NgramProposeParams& p, int64_t first, int64_t count) {
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    drafter_.store(p, first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  Drafter drafter_;
  UpdatedRow rows_[kMaxRequestsPerDraftPass];
  int32_t padding_tokens_[kMaxRequestsPerDraftPass];
};

// The lookup uses the row including the sampled tokens, which are written to the row in global memory only afterwards.
__aicore__ inline UpdatedRow updated_row(const NgramStepParams& p, int64_t i, const AcceptResult& result) {
  const int64_t length = result.old_length + result.num_appended;
  if (!should_draft(result) || !may_draft(length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[result.row], result.old_length, p.sampled_token_ids[i], length};
}
template <>
__aicore__ inline UpdatedRow updated_row(const NgramStepParams& p, int64_t i) {
  return updated_row(p, i, accept_tokens(p, i));
}

// Writes a request's sampled tokens and new length to its row. Stages both in the unified buffer, each at a multiple of
// 32 bytes.
class Appender : public AppenderLayout {
 public:
  __aicore__ inline Appender(AscendC::TPipe& pipe, int64_t per_pass)
      : tokens_(pipe, per_pass * kSampledTokensStride), lengths_(pipe, per_pass * kLengthStride) {}

  __aicore__ inline void append(const NgramStepParams& p, int64_t i, int64_t j, const AcceptResult& result) {
    if (result.num_appended <= 0) return;
    for (int64_t t = 0; t < result.num_appended; ++t)
      tokens_.set(j * kSampledTokensStride + t, p.sampled_token_ids[i][t]);
    lengths_.set(j * kLengthStride, static_cast<int32_t>(result.old_length + result.num_appended));
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    tokens_.store(j * kSampledTokensStride, p.token_ids[result.row] + result.old_length, result.num_appended);
    if (p.advance) lengths_.store(j * kLengthStride, p.num_tokens + result.row, 1);
  }

 private:
  LocalBuffer<int32_t> tokens_, lengths_;
};

// add() also appends the sampled tokens to the row.
template <>
class Results<NgramStepParams> : public ResultsLayout<NgramStepParams> {
 public:
  __aicore__ inline Results(AscendC::TPipe& pipe, int64_t per_pass, const NgramStepParams& p)
      : drafter_(pipe, per_pass, p),
        appender_(pipe, per_pass),
        next_tokens_(pipe, per_pass),
        num_sampled_(pipe, per_pass) {}

  __aicore__ inline void prepare(const NgramStepParams& p, int64_t i, int64_t j) {
    const AcceptResult result = results_[j] = accept_tokens(p, i);
    next_tokens_.set(j, result.next_token);
    num_sampled_.set(j, static_cast<int32_t>(result.num_sampled));
  }
  template <class GetBestMatch>
  __aicore__ inline void add(const NgramStepParams& p, int64_t i, int64_t j, const GetBestMatch& get_best_match) {
    const AcceptResult& result = results_[j];
    drafter_.draft(j, updated_row(p, i, result), get_best_match, padding_token(p, result));
    appender_.append(p, i, j, result);
  }
  __aicore__ inline void store(const NgramStepParams& p, int64_t first, int64_t count) {
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    next_tokens_.store(0, p.next_token_ids + first, count);
    num_sampled_.store(0, p.num_sampled + first, count);
    drafter_.store(p, first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  Drafter drafter_;
  Appender appender_;
  LocalBuffer<int32_t> next_tokens_, num_sampled_;
  AcceptResult results_[kMaxRequestsPerDraftPass];
};

}  // namespace ngram_npu::ascendc

NGRAM_NPU_KERNEL(ngram_npu_ngram_propose, ngram_npu::ascendc::search_and_draft<ngram_npu::NgramProposeParams>)
NGRAM_NPU_KERNEL(ngram_npu_ngram_propose_search,
                 ngram_npu::ascendc::search_into_workspace<ngram_npu::NgramProposeParams>)
NGRAM_NPU_KERNEL(ngram_npu_ngram_propose_draft, ngram_npu::ascendc::draft_from_workspace<ngram_npu::NgramProposeParams>)
NGRAM_NPU_KERNEL(ngram_npu_ngram_step, ngram_npu::ascendc::search_and_draft<ngram_npu::NgramStepParams>)
NGRAM_NPU_KERNEL(ngram_npu_ngram_step_search, ngram_npu::ascendc::search_into_workspace<ngram_npu::NgramStepParams>)
NGRAM_NPU_KERNEL(ngram_npu_ngram_step_draft, ngram_npu::ascendc::draft_from_workspace<ngram_npu::NgramStepParams>)
