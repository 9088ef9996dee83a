// AscendC kernels of the drafting operators (plans in plans.h).
#include "core/drafting.h"

#include "ascendc/lookup.h"

namespace ngram_npu::ascendc {

template <>
__aicore__ inline UpdatedRow updated_row(const NgramProposeParams& p, int64_t i) {
  const RequestRow valid = request_row(p, i);
  if (!may_draft(valid.length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[valid.row], valid.length, nullptr, valid.length};
}

class ProposeResults {
 public:
  __aicore__ inline ProposeResults(AscendC::TPipe& pipe, int64_t per_pass, const NgramProposeParams& p)
      : drafter_(pipe, per_pass, p) {}

  __aicore__ inline void prepare(const NgramProposeParams& p, int64_t i, int64_t j) {
    rows_[j] = updated_row(p, i);
    padding_tokens_[j] = padding_token(p, i);
  }
  template <class Best>
  __aicore__ inline void add(const NgramProposeParams&, int64_t, int64_t j, const Best& best) {
    drafter_.draft(j, rows_[j], best, padding_tokens_[j]);
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

// The lookup uses the row including the sampled tokens. They are written to the row in global memory only afterwards.
__aicore__ inline UpdatedRow updated_row(const NgramStepParams& p, int64_t i, const Accepted& a) {
  const int64_t length = a.old_length + a.num_appended;
  if (!should_draft(a) || !may_draft(length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[a.row], a.old_length, p.sampled_token_ids[i], length};
}
template <>
__aicore__ inline UpdatedRow updated_row(const NgramStepParams& p, int64_t i) {
  return updated_row(p, i, accept_tokens(p, i));
}

// Writes a request's sampled tokens and new length to its row. Stages both in the unified buffer, each in its own
// 32-byte units.
class Appender {
 public:
  __aicore__ inline Appender(AscendC::TPipe& pipe, int64_t per_pass)
      : tokens_(pipe, per_pass * kSampledTokensStride), lengths_(pipe, per_pass * kLengthStride) {}

  __aicore__ inline void append(const NgramStepParams& p, int64_t i, int64_t j, const Accepted& a) {
    if (a.num_appended <= 0) return;
    for (int64_t t = 0; t < a.num_appended; ++t) tokens_.set(j * kSampledTokensStride + t, p.sampled_token_ids[i][t]);
    lengths_.set(j * kLengthStride, static_cast<int32_t>(a.old_length + a.num_appended));
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    tokens_.store(j * kSampledTokensStride, p.token_ids[a.row] + a.old_length, a.num_appended);
    if (p.advance) lengths_.store(j * kLengthStride, p.num_tokens + a.row, 1);
  }

 private:
  LocalBuffer<int32_t> tokens_, lengths_;
};

class StepResults {
 public:
  __aicore__ inline StepResults(AscendC::TPipe& pipe, int64_t per_pass, const NgramStepParams& p)
      : drafter_(pipe, per_pass, p),
        appender_(pipe, per_pass),
        next_tokens_(pipe, per_pass),
        num_sampled_(pipe, per_pass) {}

  __aicore__ inline void prepare(const NgramStepParams& p, int64_t i, int64_t j) {
    const Accepted a = accepted_[j] = accept_tokens(p, i);
    next_tokens_.set(j, a.next_token);
    num_sampled_.set(j, static_cast<int32_t>(a.num_sampled));
  }
  template <class Best>
  __aicore__ inline void add(const NgramStepParams& p, int64_t i, int64_t j, const Best& best) {
    const Accepted& a = accepted_[j];
    drafter_.draft(j, updated_row(p, i, a), best, padding_token(p, a));
    appender_.append(p, i, j, a);
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
  Accepted accepted_[kMaxRequestsPerDraftPass];
};

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_and_draft<ngram_npu::NgramProposeParams, ngram_npu::ascendc::ProposeResults>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_search(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_into_workspace<ngram_npu::NgramProposeParams>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_propose_draft(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::draft_from_workspace<ngram_npu::NgramProposeParams, ngram_npu::ascendc::ProposeResults>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_step(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_and_draft<ngram_npu::NgramStepParams, ngram_npu::ascendc::StepResults>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_step_search(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::search_into_workspace<ngram_npu::NgramStepParams>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_step_draft(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::draft_from_workspace<ngram_npu::NgramStepParams, ngram_npu::ascendc::StepResults>(args);
}
