// What a draft token costs, in sixteenths of a bit. Definition: docs/ops/ngram_index_propose.md, "Cost" and "Token
// logits".
#pragma once

#include "core/common.h"

namespace ngram_npu {

constexpr int64_t kTokenClasses = 4096;  // of a table of token logits: a token's id modulo this
constexpr int64_t kTokenLogitRows = 2;   // by the drafted token, by the one before it

// The cost of a logit, in 32nds of a nat: round(16 log2(1 + e^(-logit / 32))). Logits beyond the ends count as these.
struct LogitCosts {
  static constexpr int32_t kLeast = -512, kMost = 511;

  uint8_t of[kMost - kLeast + 1];
  // The compiler works it out in IEEE doubles, and no value is near the middle between two costs.
  constexpr LogitCosts() : of() {
    constexpr double kStep = 1.0317434074991028;                     // e^(1/32)
    constexpr double kCost = 1.0442737824274138;                     // 2^(1/16)
    double odds = 1.1610742462835527e-7, next = 1.0218971486541166;  // e^(-511/32), 2^(1/32)
    int cost = 0;
    for (int32_t logit = kMost; logit >= kLeast; --logit, odds *= kStep) {
      for (; cost < 255 && 1 + odds >= next; next *= kCost) ++cost;
      of[logit - kLeast] = static_cast<uint8_t>(cost);
    }
  }
};
inline constexpr LogitCosts kLogitCosts;

// A table of costs. `token_logits` null: uint8 costs; else int16 logits, to which those of the tokens are added.
struct CostTable {
  const void* cells;
  const int8_t* token_logits;  // [kTokenLogitRows, kTokenClasses]

  NGRAM_FN uint8_t cost(int64_t cell, int32_t before, int32_t token) const {
    if (token_logits == nullptr) return static_cast<const uint8_t*>(cells)[cell];
    const auto logit_of = [&](int64_t row, int32_t id) {
      return token_logits[row * kTokenClasses + static_cast<uint32_t>(id) % kTokenClasses];
    };
    const int32_t logit = static_cast<const int16_t*>(cells)[cell] + logit_of(0, token) + logit_of(1, before);
    const int32_t within = smaller(larger(logit, LogitCosts::kLeast), LogitCosts::kMost);
    return kLogitCosts.of[within - LogitCosts::kLeast];
  }
};

}  // namespace ngram_npu
