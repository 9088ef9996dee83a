// AscendC kernel of merge_drafts_. plans.h plans its launch.
#include "core/merging.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// AcceptanceProbabilities in the unified buffer, because a kernel has no constant arrays.
class ProbabilityTable : public ProbabilityTableLayout {
 public:
  __aicore__ inline ProbabilityTable(AscendC::TPipe& pipe, const MergeDraftsParams& p) : values_(pipe, kCosts) {
    if (p.draft_costs.data == nullptr) return;
    uint32_t value = kFirstProbability;
    for (int64_t cost = 0; cost < kCosts; ++cost, value = next_probability(value)) values_.set(cost, value);
  }
  __aicore__ inline uint32_t operator[](uint32_t cost) const { return values_.get(cost); }

 private:
  LocalBuffer<uint32_t> values_;
};

// The arrays of a pass of requests, with the same member names as the parameters, so that the functions in core/ accept
// it, and the requests' rows of neural_acceptance.
template <class Token>
class StagedMerge : public StagedMergeLayout<Token> {
 public:
  __aicore__ inline StagedMerge(AscendC::TPipe& pipe, const MergeDraftsParams& p, int64_t per_pass)
      : num_ngram_draft_tokens(pipe, p.num_ngram_draft_tokens, per_pass),
        match_len(pipe, p.match_len, per_pass),
        num_neural_draft_tokens(pipe, p.num_neural_draft_tokens, per_pass),
        num_sampled(pipe, p.num_sampled, per_pass),
        num_scheduled_drafts(pipe, p.num_scheduled_drafts, per_pass),
        row_indices(pipe, p.row_indices, per_pass),
        ngram_draft_token_ids(pipe, p.ngram_draft_token_ids, per_pass),
        neural_draft_token_ids(
            pipe, {static_cast<Gm<const Token>>(p.neural_draft_token_ids), p.batch, p.neural_width, p.neural_stride},
            per_pass),
        draft_costs(pipe, p.draft_costs, per_pass),
        neural_draft_costs(pipe, p.neural_draft_costs, per_pass),
        p_(p),
        acceptance_(pipe, per_pass * kUnitItems) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    first_ = first;
    num_ngram_draft_tokens.load(first, count);
    match_len.load(first, count);
    if (p_.num_neural_draft_tokens != nullptr) num_neural_draft_tokens.load(first, count);
    if (p_.num_sampled != nullptr) num_sampled.load(first, count);
    if (p_.num_scheduled_drafts != nullptr) num_scheduled_drafts.load(first, count);
    row_indices.load(first, count);
    ngram_draft_token_ids.load(first, count);
    neural_draft_token_ids.load(first, count);
    if (p_.draft_costs.data != nullptr) draft_costs.load(first, count);
    if (p_.neural_draft_costs.data != nullptr) neural_draft_costs.load(first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    if (p_.neural_acceptance.data == nullptr) return;
    for (int64_t i = first; i < first + count; ++i) {
      if (has_acceptance(p_, row_indices[i]))
        acceptance_.load((i - first) * kUnitItems, p_.neural_acceptance[row_indices[i]], kAcceptanceColumns);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
  }

  __aicore__ inline UbWords acceptance(int64_t i) const { return {acceptance_, (i - first_) * kUnitItems}; }
  // The rows of other requests may be in the same 32 bytes. A copy writes only the bytes of this one.
  __aicore__ inline void store_acceptance(int64_t i) const {
    acceptance_.store((i - first_) * kUnitItems, p_.neural_acceptance[row_indices[i]], kAcceptanceColumns);
  }

  UbWindow<int32_t> num_ngram_draft_tokens, match_len, num_neural_draft_tokens, num_sampled, num_scheduled_drafts;
  IndexWindow row_indices;
  StagedRows<int32_t> ngram_draft_token_ids;
  StagedRows<Token> neural_draft_token_ids;
  StagedRows<uint8_t> draft_costs, neural_draft_costs;

 private:
  const MergeDraftsParams& p_;
  LocalBuffer<int32_t> acceptance_;
  int64_t first_ = 0;
};

// The merged drafts of a pass of requests.
template <class Token>
class MergeResults : public MergeResultsLayout<Token> {
 public:
  __aicore__ inline MergeResults(AscendC::TPipe& pipe, const MergeDraftsParams& p, int64_t per_pass)
      : p_(p),
        k_(p.ngram_draft_token_ids.capacity),
        stride_(round_up_items<Token>(k_)),
        tokens_(pipe, per_pass * stride_),
        num_draft_tokens_(pipe, per_pass),
        sources_(pipe, per_pass) {}

  // Merges the drafts of request i, which is the j-th of the pass.
  __aicore__ inline void merge(const StagedMerge<Token>& batch, const ProbabilityTable& probabilities, int64_t i,
                               int64_t j) {
    const auto neural_tokens = batch.neural_draft_token_ids[i];
    const auto ngram_tokens = batch.ngram_draft_token_ids[i];
    const bool has_mean = has_acceptance(p_, batch.row_indices[i]);
    const int64_t mean = has_mean ? mean_accepted(p_, batch, batch.acceptance(i), i) : kUnknownMean;
    const DraftSource source = choose_source(p_, batch, probabilities, i, neural_tokens, ngram_tokens, mean);
    const int64_t num_neural = count_neural_drafts(p_, batch, i);
    for (int64_t t = 0; t < k_; ++t)
      tokens_.set(j * stride_ + t, merged_token<Token>(source, num_neural, neural_tokens, ngram_tokens, t));
    const int64_t count = uses_ngram_tokens(source) ? count_ngram_drafts(p_, batch, i) : num_neural;
    num_draft_tokens_.set(j, static_cast<int32_t>(count));
    sources_.set(j, source);
    if (!has_mean) return;
    batch.acceptance(i)[kMeanAccepted] = static_cast<int32_t>(mean);
    batch.acceptance(i)[kLastNeuralDrafts] = last_neural_drafts(source, num_neural);
  }

  __aicore__ inline void store(const StagedMerge<Token>& batch, int64_t first, int64_t count) const {
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    for (int64_t j = 0; j < count; ++j) {
      tokens_.store(j * stride_, static_cast<Gm<Token>>(p_.draft_token_ids) + (first + j) * k_, k_);
      if (has_acceptance(p_, batch.row_indices[first + j]) && batch.num_sampled[first + j] > 0)
        batch.store_acceptance(first + j);
    }
    num_draft_tokens_.store(0, p_.num_draft_tokens + first, count);
    sources_.store(0, p_.draft_source + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  const MergeDraftsParams& p_;
  const int64_t k_, stride_;
  LocalBuffer<Token> tokens_;
  LocalBuffer<int32_t> num_draft_tokens_, sources_;
};

template <class Token>
__aicore__ inline void merge_all_drafts(const MergeDraftsParams& p, const CoreTiling& core_tiling) {
  AscendC::TPipe pipe;
  const ProbabilityTable probabilities(pipe, p);
  StagedMerge<Token> batch(pipe, p, core_tiling.per_pass);
  MergeResults<Token> results(pipe, p, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    batch.load(first, count);
    for (int64_t j = 0; j < count; ++j) results.merge(batch, probabilities, first + j, j);
    results.store(batch, first, count);
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
