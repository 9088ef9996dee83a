// AscendC kernel of merge_drafts_. plans.h plans its launch.
#include "core/merging.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// AcceptanceProbabilities in the unified buffer, because a kernel has no constant arrays.
class ProbabilityTable : public ProbabilityTableLayout {
 public:
  __aicore__ inline explicit ProbabilityTable(AscendC::TPipe& pipe) : values_(pipe, kCosts) {
    uint32_t value = kFirstProbability;
    for (int64_t cost = 0; cost < kCosts; ++cost, value = next_probability(value)) values_.set(cost, value);
  }
  __aicore__ inline uint32_t operator[](uint32_t cost) const { return values_.get(cost); }

 private:
  LocalBuffer<uint32_t> values_;
};

// The merged drafts of a pass of requests, and their rows of neural_acceptance.
template <class Token>
class MergedDrafts : public MergedDraftsLayout<Token> {
 public:
  __aicore__ inline MergedDrafts(AscendC::TPipe& pipe, const MergeDraftsParams& p, int64_t per_pass)
      : p_(p),
        k_(p.ngram_draft_token_ids.capacity),
        stride_(round_up_items<Token>(k_)),
        tokens_(pipe, per_pass * stride_),
        num_draft_tokens_(pipe, per_pass),
        sources_(pipe, per_pass),
        acceptance_(pipe, per_pass * kUnitItems) {}

  __aicore__ inline void set(int64_t j, const MergedDraft<Token>& draft) {
    for (int64_t t = 0; t < k_; ++t) tokens_.set(j * stride_ + t, draft[t]);
    num_draft_tokens_.set(j, draft.num_tokens());
    sources_.set(j, draft.source);
    acceptance_rows_[j] = draft.acceptance_row;
    if (draft.acceptance_row >= 0) draft.set_acceptance(UbWords{acceptance_, j * kUnitItems});
  }

  // Rows of neural_acceptance share units of 32 bytes with rows of other cores' requests. A copy writes only its bytes.
  __aicore__ inline void store(int64_t first, int64_t count) const {
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    for (int64_t j = 0; j < count; ++j) {
      tokens_.store(j * stride_, static_cast<Gm<Token>>(p_.draft_token_ids) + (first + j) * k_, k_);
      if (acceptance_rows_[j] >= 0)
        acceptance_.store(j * kUnitItems, p_.neural_acceptance[acceptance_rows_[j]], kAcceptanceColumns);
    }
    num_draft_tokens_.store(0, p_.num_draft_tokens + first, count);
    sources_.store(0, p_.draft_source + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  const MergeDraftsParams& p_;
  const int64_t k_, stride_;
  LocalBuffer<Token> tokens_;
  LocalBuffer<int32_t> num_draft_tokens_, sources_, acceptance_;
  int64_t acceptance_rows_[kMaxRequestsPerDraftPass];
};

template <class Token>
__aicore__ inline void merge_all_drafts(const MergeDraftsParams& p, const CoreTiling& core_tiling) {
  AscendC::TPipe pipe;
  const ProbabilityTable probabilities(pipe);
  MergedDrafts<Token> drafts(pipe, p, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    for (int64_t j = 0; j < count; ++j) drafts.set(j, choose_draft<Token>(p, probabilities, first + j));
    drafts.store(first, count);
  }
}

__aicore__ inline void merge_drafts_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<MergeDraftsParams>(args.params);
  const auto core_tiling = read_as<CoreTiling>(args.tiling);
  if (p.token_bytes == 8) {
    merge_all_drafts<int64_t>(p, core_tiling);
  } else {
    merge_all_drafts<int32_t>(p, core_tiling);
  }
}

}  // namespace ngram_npu::ascendc

NGRAM_NPU_KERNEL(ngram_npu_merge_drafts, ngram_npu::ascendc::merge_drafts_kernel)
