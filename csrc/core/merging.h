// Parameters and per-request functions of merge_drafts_, which chooses between each request's neural draft and its
// n-gram draft. Contract: docs/ops/merge_drafts.md.
#pragma once

#include "core/draft_costs.h"

namespace ngram_npu {

enum DraftSource : int32_t { kNoDraft = 0, kNeuralDraft = 1, kNgramDraft = 2, kExtendedDraft = 3 };

// Columns of neural_acceptance. kMeanAccepted: mean number of accepted neural draft tokens, in 65536ths.
// kLastNeuralDrafts: 1 + number of neural draft tokens that the last step chose; 0: no step was recorded.
enum Acceptance : int64_t { kMeanAccepted, kLastNeuralDrafts, kAcceptanceColumns };
constexpr int64_t kFixedPointOne = 65536;  // 1.0 in kMeanAccepted
constexpr int64_t kAcceptanceWindow = 8;   // the newest step has weight 1/8 in the moving average

// Absent optional tensors are null.
struct MergeDraftsParams {
  Gm<const void> neural_draft_token_ids;  // [B, neural_width]; rows are neural_stride ids apart
  int64_t neural_width;
  int64_t neural_stride;
  int32_t token_bytes;  // size of an id in neural_draft_token_ids and draft_token_ids: 4 or 8
  bool extend;          // whether an n-gram draft continues a shorter neural draft with the same tokens
  TokenRows<const int32_t> ngram_draft_token_ids;  // [B, k]
  Gm<const int32_t> num_ngram_draft_tokens;        // [B]
  Gm<const int32_t> match_len;                     // [B]
  Gm<const int32_t> num_neural_draft_tokens;       // [B]
  TokenRows<const uint8_t> draft_costs;            // [B, k]
  TokenRows<const uint8_t> neural_draft_costs;     // [B, neural_width]
  IndexArray row_indices;                          // [B]
  Gm<const int32_t> num_sampled;                   // [B]
  Gm<const int32_t> num_scheduled_drafts;          // [B]
  TokenRows<int32_t> neural_acceptance;            // [R, kAcceptanceColumns]
  int64_t min_match_len;
  int64_t threshold;  // minimum expected number of accepted tokens of an n-gram draft, in 65536ths
  int64_t batch;
  Gm<void> draft_token_ids;      // [B, k]
  Gm<int32_t> num_draft_tokens;  // [B]
  Gm<int32_t> draft_source;      // [B]
};

NGRAM_FN int64_t clamp_count(int64_t value, int64_t max) { return larger<int64_t>(0, smaller(value, max)); }

// In the following functions, the type Batch is MergeDraftsParams or a kernel's struct of staged copies of the arrays,
// with the same member names. `p` tells which arrays are present.

template <class Batch>
NGRAM_FN int64_t count_neural_drafts(const MergeDraftsParams& p, const Batch& batch, int64_t i) {
  return p.num_neural_draft_tokens == nullptr ? p.neural_width
                                              : clamp_count(batch.num_neural_draft_tokens[i], p.neural_width);
}

template <class Batch>
NGRAM_FN int64_t count_ngram_drafts(const MergeDraftsParams& p, const Batch& batch, int64_t i) {
  return clamp_count(batch.num_ngram_draft_tokens[i], p.ngram_draft_token_ids.capacity);
}

NGRAM_FN bool has_acceptance(const MergeDraftsParams& p, int64_t row) {
  return p.neural_acceptance.data != nullptr && p.neural_acceptance.has(row);
}

// Mean number of accepted neural draft tokens, in 65536ths, after request i's step. `acceptance` is the request's row.
template <class Batch, class Acceptance>
NGRAM_FN int64_t mean_accepted(const MergeDraftsParams& p, const Batch& batch, const Acceptance& acceptance,
                               int64_t i) {
  int64_t num_drafted = int64_t{acceptance[kLastNeuralDrafts]} - 1;
  if (num_drafted < 0) return p.neural_width * kFixedPointOne;
  if (p.num_scheduled_drafts != nullptr) num_drafted = smaller<int64_t>(num_drafted, batch.num_scheduled_drafts[i]);
  const int64_t mean = acceptance[kMeanAccepted];
  const int64_t num_sampled = batch.num_sampled[i];
  if (num_drafted <= 0 || num_sampled <= 0) return mean;
  const int64_t num_accepted = smaller(smaller(num_sampled - 1, num_drafted), kMaxDraftTokens);
  const int64_t new_mean = mean + (num_accepted * kFixedPointOne - mean) / kAcceptanceWindow;
  // A truncated draft whose tokens were all accepted does not lower the mean: more tokens might have been accepted.
  return num_accepted == num_drafted && num_drafted < p.neural_width ? larger(mean, new_mean) : new_mean;
}

constexpr int64_t kUnknownMean = INT64_MIN;  // of a request without acceptance

// Whether request i uses its num_ngram > 0 n-gram draft tokens instead of its num_neural > 0 neural draft tokens.
template <class Batch, class Probabilities>
NGRAM_FN bool uses_ngram(const MergeDraftsParams& p, const Batch& batch, const Probabilities& probabilities, int64_t i,
                         int64_t num_neural, int64_t num_ngram, int64_t mean) {
  if (batch.match_len[i] < p.min_match_len) return false;
  if (p.draft_costs.data == nullptr) return true;
  const int64_t expected_tokens = expected_accepted_tokens(probabilities, batch.draft_costs[i], num_ngram);
  if (expected_tokens < p.threshold) return false;
  if (p.neural_draft_costs.data != nullptr)
    return expected_tokens > expected_accepted_tokens(probabilities, batch.neural_draft_costs[i], num_neural);
  return expected_tokens > smaller(mean, num_neural * kFixedPointOne);
}

// Chooses the draft of request i. `neural_tokens` and `ngram_tokens` are its drafts.
template <class Batch, class Probabilities, class NeuralTokens, class NgramTokens>
NGRAM_FN DraftSource choose_source(const MergeDraftsParams& p, const Batch& batch, const Probabilities& probabilities,
                                   int64_t i, const NeuralTokens& neural_tokens, const NgramTokens& ngram_tokens,
                                   int64_t mean) {
  const int64_t num_neural = count_neural_drafts(p, batch, i), num_ngram = count_ngram_drafts(p, batch, i);
  if (num_ngram > 0 && (num_neural == 0 || uses_ngram(p, batch, probabilities, i, num_neural, num_ngram, mean)))
    return kNgramDraft;
  if (num_neural == 0) return kNoDraft;
  if (!p.extend || num_neural >= num_ngram) return kNeuralDraft;
  int64_t num_equal = 0;
  while (num_equal < num_neural && neural_tokens[num_equal] == ngram_tokens[num_equal]) ++num_equal;
  return num_equal == num_neural ? kExtendedDraft : kNeuralDraft;
}

NGRAM_FN bool uses_ngram_tokens(DraftSource source) { return source == kNgramDraft || source == kExtendedDraft; }

// The value of kLastNeuralDrafts after a step.
NGRAM_FN int32_t last_neural_drafts(DraftSource source, int64_t num_neural) {
  return static_cast<int32_t>(1 + (source == kNgramDraft ? 0 : num_neural));
}

// Token j of the merged draft.
template <class Token, class NeuralTokens, class NgramTokens>
NGRAM_FN Token merged_token(DraftSource source, int64_t num_neural, const NeuralTokens& neural_tokens,
                            const NgramTokens& ngram_tokens, int64_t j) {
  if (uses_ngram_tokens(source)) return static_cast<Token>(ngram_tokens[j]);
  return j < num_neural ? static_cast<Token>(neural_tokens[j]) : Token{kNoToken};
}

// Chooses and writes the draft of request i. Token is int32_t or int64_t, according to p.token_bytes.
template <class Token>
NGRAM_FN void merge_drafts(const MergeDraftsParams& p, const AcceptanceProbabilities& probabilities, int64_t i) {
  const int64_t k = p.ngram_draft_token_ids.capacity;
  const Gm<const Token> neural_tokens = static_cast<Gm<const Token>>(p.neural_draft_token_ids) + i * p.neural_stride;
  const Gm<const int32_t> ngram_tokens = p.ngram_draft_token_ids[i];
  Gm<int32_t> acceptance = nullptr;
  int64_t mean = kUnknownMean;
  if (has_acceptance(p, p.row_indices[i])) {
    acceptance = p.neural_acceptance[p.row_indices[i]];
    mean = mean_accepted(p, p, acceptance, i);
  }
  const DraftSource source = choose_source(p, p, probabilities, i, neural_tokens, ngram_tokens, mean);
  const int64_t num_neural = count_neural_drafts(p, p, i);
  const Gm<Token> draft = static_cast<Gm<Token>>(p.draft_token_ids) + i * k;
  for (int64_t j = 0; j < k; ++j) draft[j] = merged_token<Token>(source, num_neural, neural_tokens, ngram_tokens, j);
  p.num_draft_tokens[i] = static_cast<int32_t>(uses_ngram_tokens(source) ? count_ngram_drafts(p, p, i) : num_neural);
  p.draft_source[i] = source;
  if (acceptance != nullptr && p.num_sampled[i] > 0) {
    acceptance[kMeanAccepted] = static_cast<int32_t>(mean);
    acceptance[kLastNeuralDrafts] = last_neural_drafts(source, num_neural);
  }
}

}  // namespace ngram_npu
