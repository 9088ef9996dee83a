// Parameters and per-request functions of merge_drafts_, which chooses between each request's neural draft and its
// n-gram draft. Contract: docs/ops/merge_drafts.md.
#pragma once

#include "core/common.h"

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

// 2^(-cost / 16) with 16 fractional bits, for cost 0, and for the cost after that of `probability`. Repeated
// multiplication gives the same integers everywhere.
constexpr uint32_t kFirstProbability = 65536;
NGRAM_FN constexpr uint32_t next_probability(uint32_t probability) {
  return static_cast<uint32_t>(uint64_t{probability} * 62757 >> 16);
}

// The probability of each cost.
struct AcceptanceProbabilities {
  uint32_t values[256];
  constexpr AcceptanceProbabilities() : values() {
    values[0] = kFirstProbability;
    for (int i = 1; i < 256; ++i) values[i] = next_probability(values[i - 1]);
  }
  NGRAM_FN uint32_t operator[](uint32_t cost) const { return values[cost]; }
};

// The expected number of accepted tokens among the first `count` tokens of a draft, in 65536ths, computed from the
// costs of its tokens in 1/16 bit. Kernels may have their own copies of the probabilities and the costs.
template <class Probabilities, class Costs>
NGRAM_FN uint32_t expected_accepted_tokens(const Probabilities& probabilities, const Costs& costs, int64_t count) {
  uint32_t expected_tokens = 0, total_cost = 0;
  for (int64_t j = 0; j < count; ++j) {
    total_cost += costs[j];
    if (total_cost > 255) break;
    expected_tokens += probabilities[total_cost];
  }
  return expected_tokens;
}

NGRAM_FN int64_t clamp_count(int64_t value, int64_t max) { return larger<int64_t>(0, smaller(value, max)); }

// Mean number of accepted neural draft tokens, in 65536ths, after request i's step. `acceptance` is the request's row.
NGRAM_FN int64_t mean_accepted(const MergeDraftsParams& p, Gm<const int32_t> acceptance, int64_t i) {
  int64_t num_drafted = int64_t{acceptance[kLastNeuralDrafts]} - 1;
  if (num_drafted < 0) return p.neural_width * kFixedPointOne;
  if (p.num_scheduled_drafts != nullptr) num_drafted = smaller<int64_t>(num_drafted, p.num_scheduled_drafts[i]);
  const int64_t mean = acceptance[kMeanAccepted];
  const int64_t num_sampled = p.num_sampled[i];
  if (num_drafted <= 0 || num_sampled <= 0) return mean;
  const int64_t num_accepted = smaller(smaller(num_sampled - 1, num_drafted), kMaxDraftTokens);
  const int64_t new_mean = mean + (num_accepted * kFixedPointOne - mean) / kAcceptanceWindow;
  // A truncated draft whose tokens were all accepted does not lower the mean: more tokens might have been accepted.
  return num_accepted == num_drafted && num_drafted < p.neural_width ? larger(mean, new_mean) : new_mean;
}

// Whether request i uses its num_ngram > 0 n-gram draft tokens instead of its num_neural > 0 neural draft tokens.
// `mean` is the mean number of accepted neural draft tokens (INT64_MIN: unknown). `probabilities` are those of
// AcceptanceProbabilities.
template <class Probabilities>
NGRAM_FN bool uses_ngram(const MergeDraftsParams& p, const Probabilities& probabilities, int64_t i, int64_t num_neural,
                         int64_t num_ngram, int64_t mean) {
  if (p.match_len[i] < p.min_match_len) return false;
  if (p.draft_costs.data == nullptr) return true;
  const int64_t expected_tokens = expected_accepted_tokens(probabilities, p.draft_costs[i], num_ngram);
  if (expected_tokens < p.threshold) return false;
  if (p.neural_draft_costs.data != nullptr)
    return expected_tokens > expected_accepted_tokens(probabilities, p.neural_draft_costs[i], num_neural);
  return expected_tokens > smaller(mean, num_neural * kFixedPointOne);
}

// The draft that is chosen for a request. Token is int32_t or int64_t, according to p.token_bytes.
template <class Token>
struct MergedDraft {
  Gm<const Token> neural_tokens;
  Gm<const int32_t> ngram_tokens;
  int64_t num_neural;
  int64_t num_ngram;
  DraftSource source;
  int64_t mean;            // new mean number of accepted neural draft tokens
  int64_t acceptance_row;  // row of neural_acceptance that is written; -1: none

  NGRAM_FN bool uses_ngram_tokens() const { return source == kNgramDraft || source == kExtendedDraft; }
  NGRAM_FN int32_t num_tokens() const { return static_cast<int32_t>(uses_ngram_tokens() ? num_ngram : num_neural); }
  NGRAM_FN Token operator[](int64_t j) const {
    if (uses_ngram_tokens()) return static_cast<Token>(ngram_tokens[j]);
    return j < num_neural ? neural_tokens[j] : Token{kNoToken};
  }
  // Sets the words of the request's row of neural_acceptance.
  template <class Words>
  NGRAM_FN void set_acceptance(const Words& words) const {
    words[kMeanAccepted] = static_cast<int32_t>(mean);
    words[kLastNeuralDrafts] = static_cast<int32_t>(1 + (source == kNgramDraft ? 0 : num_neural));
  }
};

// Chooses the draft of request i.
template <class Token, class Probabilities>
NGRAM_FN MergedDraft<Token> choose_draft(const MergeDraftsParams& p, const Probabilities& probabilities, int64_t i) {
  MergedDraft<Token> draft{};
  draft.neural_tokens = static_cast<Gm<const Token>>(p.neural_draft_token_ids) + i * p.neural_stride;
  draft.ngram_tokens = p.ngram_draft_token_ids[i];
  const int64_t num_neural = draft.num_neural =
      p.num_neural_draft_tokens == nullptr ? p.neural_width : clamp_count(p.num_neural_draft_tokens[i], p.neural_width);
  const int64_t num_ngram = draft.num_ngram =
      clamp_count(p.num_ngram_draft_tokens[i], p.ngram_draft_token_ids.capacity);

  draft.acceptance_row = -1;
  draft.mean = INT64_MIN;
  if (p.neural_acceptance.data != nullptr && p.neural_acceptance.has(p.row_indices[i])) {
    draft.mean = mean_accepted(p, p.neural_acceptance[p.row_indices[i]], i);
    if (p.num_sampled[i] > 0) draft.acceptance_row = p.row_indices[i];
  }

  draft.source = num_neural > 0 ? kNeuralDraft : kNoDraft;
  if (num_ngram > 0 && (num_neural == 0 || uses_ngram(p, probabilities, i, num_neural, num_ngram, draft.mean))) {
    draft.source = kNgramDraft;
  } else if (p.extend && num_neural > 0 && num_neural < num_ngram) {
    int64_t num_equal = 0;
    while (num_equal < num_neural && draft.neural_tokens[num_equal] == draft.ngram_tokens[num_equal]) ++num_equal;
    if (num_equal == num_neural) draft.source = kExtendedDraft;
  }
  return draft;
}

// Chooses and writes the draft of request i.
template <class Token>
NGRAM_FN void merge_drafts(const MergeDraftsParams& p, const AcceptanceProbabilities& probabilities, int64_t i) {
  const MergedDraft<Token> draft = choose_draft<Token>(p, probabilities, i);
  const int64_t k = p.ngram_draft_token_ids.capacity;
  const Gm<Token> tokens = static_cast<Gm<Token>>(p.draft_token_ids) + i * k;
  for (int64_t j = 0; j < k; ++j) tokens[j] = draft[j];
  p.num_draft_tokens[i] = draft.num_tokens();
  p.draft_source[i] = draft.source;
  if (draft.acceptance_row >= 0) draft.set_acceptance(p.neural_acceptance[draft.acceptance_row]);
}

}  // namespace ngram_npu
