// What a draft token costs, in sixteenths of a bit. Definition: docs/ops/ngram_index_propose.md, "Cost" and "Token
// logits".
#pragma once

#include "core/common.h"

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
    const int8_t* const own = logits_of(token);
    const int32_t logit = static_cast<const int16_t*>(table_.cells)[cell] + own[0] + before_;
    before_ = own[1];
    return kLogitCosts.of[static_cast<uint32_t>(logit - LogitCosts::kLeast) % LogitCosts::kCount];
  }

 private:
  NGRAM_FN const int8_t* logits_of(int32_t token) const {
    return table_.token_logits + 2 * (static_cast<uint32_t>(token) % kTokenClasses);
  }

  const CostTable table_;
  int8_t before_ = 0;
};

}  // namespace ngram_npu
