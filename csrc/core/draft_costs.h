// The cost of a draft token in 1/16 bit, and the expected number of accepted tokens computed from the costs. The index
// (with outcome bytes) and merge_drafts_ use these functions. Definition: docs/ops/ngram_index_propose.md,
// "Cost" and "Token logits".
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu {

constexpr uint32_t kTokenLogitRows = 4096;  // rows of the token logit table; token t uses row t % kTokenLogitRows

// The cost for each logit; logits are in 1/32 nat. The cost is round(16 log2(1 + e^(-logit / 32))), at most 255. A sum
// of logits out of range wraps around, because clamping would take longer than the addition.
struct LogitCosts {
  static constexpr int32_t kMinLogit = -1024, kMaxLogit = 1023;
  static constexpr uint32_t kCount = kMaxLogit - kMinLogit + 1;

  uint8_t values[kCount];
  // Computes the table at compile time in IEEE doubles. No value is close to a rounding boundary, so every compiler
  // produces the same table.
  constexpr LogitCosts() : values() {
    constexpr double kLogitFactor = 1.0317434074991028;  // e^(1/32)
    constexpr double kCostFactor = 1.0442737824274138;   // 2^(1/16)
    double odds_against = 1.3066169316755169e-14;        // the odds of rejection, e^(-logit / 32), for kMaxLogit
    double rounding_limit = 1.0218971486541166;  // 2^(1/32): smallest 1 + odds_against that costs more than `cost`
    int cost = 0;
    for (int32_t logit = kMaxLogit; logit >= kMinLogit; --logit, odds_against *= kLogitFactor) {
      while (cost < 255 && 1 + odds_against >= rounding_limit) {
        ++cost;
        rounding_limit *= kCostFactor;
      }
      values[logit - kMinLogit] = static_cast<uint8_t>(cost);
    }
  }
};
inline constexpr LogitCosts kLogitCosts;

// A table of costs. If `token_logits` is null, the cells are uint8 costs. Otherwise the cells are int16 logits, and the
// logits of the drafted token and of the token before it are added.
struct CostTable {
  const void* cells;
  // [kTokenLogitRows, 2]: column 0 is for the drafted token, column 1 is for the token before the drafted token.
  const int8_t* token_logits;
};

// Computes the costs of a draft's tokens in order. `token_before` is the token before the draft.
class DraftCostReader {
 public:
  NGRAM_FN DraftCostReader(const CostTable& table, int32_t token_before) : table_(table) {
    if (table.token_logits != nullptr) logit_before_ = logits_of(token_before)[1];
  }

  // Returns the cost of `token`, the draft's next token, from this cell of the table.
  NGRAM_FN uint8_t next(int64_t cell, int32_t token) {
    if (table_.token_logits == nullptr) return static_cast<const uint8_t*>(table_.cells)[cell];
    const int8_t* const logits = logits_of(token);
    const int32_t logit = static_cast<const int16_t*>(table_.cells)[cell] + logits[0] + logit_before_;
    logit_before_ = logits[1];
    return kLogitCosts.values[static_cast<uint32_t>(logit - LogitCosts::kMinLogit) % LogitCosts::kCount];
  }

 private:
  NGRAM_FN const int8_t* logits_of(int32_t token) const {
    return table_.token_logits + 2 * (static_cast<uint32_t>(token) % kTokenLogitRows);
  }

  const CostTable table_;
  int8_t logit_before_ = 0;
};

// 2^(-cost / 16) for each cost, with 16 fractional bits. Repeated multiplication gives the same integers everywhere.
struct AcceptanceProbabilities {
  uint32_t values[256];
  constexpr AcceptanceProbabilities() : values() {
    values[0] = 65536;
    for (int i = 1; i < 256; ++i) values[i] = static_cast<uint32_t>(uint64_t{values[i - 1]} * 62757 >> 16);
  }
};

// The expected number of accepted tokens among the first `count` tokens of a draft, in 65536ths. Definition:
// docs/ops/merge_drafts.md.
template <class Costs>
NGRAM_FN uint32_t expected_accepted_tokens(const AcceptanceProbabilities& probabilities, const Costs& costs,
                                           int64_t count) {
  uint32_t expected_tokens = 0, total_cost = 0;
  for (int64_t j = 0; j < count; ++j) {
    total_cost += costs[j];
    if (total_cost > 255) break;
    expected_tokens += probabilities.values[total_cost];
  }
  return expected_tokens;
}

// A ladder has n-grams of 1, 2, 4, 8 and 16 tokens. Its drafts end where further tokens are not likely to be accepted.
// Definition: docs/ops/ngram_index_propose.md. Rationale: docs/design/drafts.md.

constexpr int kLadderLevels = 5;
constexpr int64_t kLadderMaxN = 16;
constexpr int64_t kRowCostColumns = 32;  // of the cost table for tokens from the request's own row, one per outcome

NGRAM_FN uint32_t ladder_ngram_length(uint32_t level) { return 1u << level; }

// The outcome byte of the token at `position`: the length of the candidate, and whether it predicted the token. The
// candidate is the longest match of the tokens before the token, of at most 16 tokens; len 0: no match.
NGRAM_FN uint8_t outcome_of(Match candidate, const int32_t* tokens, int64_t position) {
  if (candidate.len == 0) return 0;
  const bool is_correct = tokens[candidate.end + 1] == tokens[position];
  return static_cast<uint8_t>(smaller<int64_t>(candidate.len, kCostRows - 1) * 2 + is_correct);
}

}  // namespace ngram_npu
