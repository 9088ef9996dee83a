// The cost of a draft token, in sixteenths of a bit, and the promise of a draft, which follows from its costs: for the
// index (outcomes), the store, and merge_drafts_. Definition: docs/ops/ngram_index_propose.md, "Cost" and "Token
// logits".
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu {

constexpr uint32_t kTokenClasses = 4096;  // of a table of token logits: a token's id modulo this

// The cost of a logit, in 32nds of a nat: round(16 log2(1 + e^(-logit / 32))), at most 255. A sum of logits wraps: to
// cut it at the ends would take longer than to add it up.
struct LogitCosts {
  static constexpr int32_t kLeast = -1024, kMost = 1023;
  static constexpr uint32_t kCount = kMost - kLeast + 1;

  uint8_t of[kCount];
  // The compiler works it out in IEEE doubles, and no value is near the middle between two costs.
  constexpr LogitCosts() : of() {
    constexpr double kStep = 1.0317434074991028;                      // e^(1/32)
    constexpr double kCost = 1.0442737824274138;                      // 2^(1/16)
    double odds = 1.3066169316755169e-14, next = 1.0218971486541166;  // e^(-1023/32), 2^(1/32)
    int cost = 0;
    for (int32_t logit = kMost; logit >= kLeast; --logit, odds *= kStep) {
      while (cost < 255 && 1 + odds >= next) {
        ++cost;
        next *= kCost;
      }
      of[logit - kLeast] = static_cast<uint8_t>(cost);
    }
  }
};
inline constexpr LogitCosts kLogitCosts;

// A table of costs. `token_logits` null: uint8 costs; else int16 logits, to which those of the tokens are added.
struct CostTable {
  const void* cells;
  const int8_t* token_logits;  // [kTokenClasses, 2]: of a drafted token, of a token before one
};

// The costs of a draft's tokens, one after the other.
class CostWalk {
 public:
  NGRAM_FN CostWalk(const CostTable& table, int32_t before) : table_(table) {
    if (table.token_logits != nullptr) before_ = logits_of(before)[1];
  }

  // `token` is the draft's next one.
  NGRAM_FN uint8_t next(int64_t cell, int32_t token) {
    if (table_.token_logits == nullptr) return static_cast<const uint8_t*>(table_.cells)[cell];
    const int8_t* const logits = logits_of(token);
    const int32_t logit = static_cast<const int16_t*>(table_.cells)[cell] + logits[0] + before_;
    before_ = logits[1];
    return kLogitCosts.of[static_cast<uint32_t>(logit - LogitCosts::kLeast) % LogitCosts::kCount];
  }

 private:
  NGRAM_FN const int8_t* logits_of(int32_t token) const {
    return table_.token_logits + 2 * (static_cast<uint32_t>(token) % kTokenClasses);
  }

  const CostTable table_;
  int8_t before_ = 0;
};

// The promise of a draft, from the costs of its tokens. Definition: docs/ops/ngram_store_step.md, "Choice".

// 2^(-cost / 16) in 65536ths, by repeated multiplication: the same integers everywhere.
struct Powers {
  uint32_t of[256];
  constexpr Powers() : of() {
    of[0] = 65536;
    for (int i = 1; i < 256; ++i) of[i] = static_cast<uint32_t>(uint64_t{of[i - 1]} * 62757 >> 16);
  }
};

// The expected number of accepted tokens among a draft's first `count`, in 65536ths. costs[j] is in sixteenths of a
// bit.
template <class Costs>
NGRAM_FN uint32_t promise_of(const Powers& powers, const Costs& costs, int64_t count) {
  uint32_t promise = 0, total = 0;
  for (int64_t j = 0; j < count; ++j) {
    total += costs[j];
    if (total > 255) break;
    promise += powers.of[total];
  }
  return promise;
}

// The rules of the ladder: n-grams of 1, 2, 4, 8 and 16 tokens, and drafts as long as they are likely to be accepted.
// Definition: docs/ops/ngram_index_propose.md; why: docs/design/drafts.md.

constexpr int kLadderLevels = 5;
constexpr int64_t kLadderMaxN = 16;
constexpr int64_t kCostColumns = 32;  // of a table of costs: the outcomes

NGRAM_FN uint32_t ladder_size(uint32_t level) { return 1u << level; }

// The outcome of the candidate for the token at `place`: the length of its match, and whether it was right. A candidate
// is an occurrence whose `len` counts up to 16 tokens that agree; `len` 0: there was none.
NGRAM_FN uint8_t outcome_of(Occurrence candidate, const int32_t* tokens, int64_t place) {
  if (candidate.len == 0) return 0;
  const bool right = tokens[candidate.end + 1] == tokens[place];
  return static_cast<uint8_t>(smaller<int64_t>(candidate.len, kCostRows - 1) * 2 + right);
}

}  // namespace ngram_npu
