// Plain C++ used by ngram_npu._C: index policy, packing of rows.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cpu/index_policy.h"
#include "cpu/row_packing.h"

namespace ngram_npu::test {
namespace {

using Slots = std::vector<int32_t>;
using NewRows = std::vector<int64_t>;

TEST(IndexPolicyTest, ScansStepsWithFewTokensAndStepsWhoseRowsAreAllBehind) {
  cpu::IndexPolicy policy;
  policy.max_scan_tokens = 1280;
  EXPECT_EQ(policy.steps_to_index(1, 1280, 1, 0, true), 0);
  EXPECT_EQ(policy.steps_to_index(1, 1281, 1, 0, true), 1);
  EXPECT_EQ(policy.steps_to_index(1, 2000, 200, 0, true), 0);
  EXPECT_EQ(policy.steps_to_index(1, 2001, 200, 0, true), 1);
  EXPECT_EQ(policy.steps_to_index(3, 9000, 2, 2, true), 0);
  EXPECT_EQ(policy.steps_to_index(4, 9000, 2, 2, true), 4);
  EXPECT_EQ(policy.steps_to_index(3, 9000, 2, 1, true), 1);
  EXPECT_EQ(policy.steps_to_index(3, 9000, 2, 2, false), 1);
}

TEST(IndexPolicyTest, KeepsAbsentRequestsByMemoryInUse) {
  const cpu::IndexPolicy policy;
  EXPECT_EQ(policy.steps_to_keep_absent(1, 0.5, true), -1);
  EXPECT_EQ(policy.steps_to_keep_absent(64, 0.5, false), -1);
  EXPECT_EQ(policy.steps_to_keep_absent(64, 0.5, true), 64);
  EXPECT_EQ(policy.steps_to_keep_absent(1, 0.6, false), 64);
  EXPECT_EQ(policy.steps_to_keep_absent(1, 0.95, false), 0);
}

cpu::CatchUpPlan plan(std::vector<int32_t> num_tokens, std::vector<int32_t> num_sampled, std::vector<int64_t> indexed,
                      int64_t min_index_budget, int64_t steps = 1) {
  cpu::IndexPolicy policy;
  policy.min_index_budget = min_index_budget;
  policy.prefill_index_budget = 600;
  const std::vector<int32_t> slots{2, 0, 1};
  return cpu::plan_catch_up(policy, num_tokens.data(), num_sampled.data(), slots.data(), indexed, steps);
}

TEST(CatchUpPlanTest, TakesAThirtySecondOfAScanAndTheTimeThatLookupsSave) {
  const std::vector<int32_t> lengths{50000, 30000, 51200}, one{1, 1, 1};
  constexpr int32_t kShare = 131200 / 32 / 768;
  const cpu::CatchUpPlan all_behind = plan(lengths, one, {0, 0, 0}, 0);
  EXPECT_EQ(all_behind.num_tokens, (Slots{kShare, 0, 0}));
  EXPECT_EQ(all_behind.rows, (NewRows{0}));
  EXPECT_EQ(all_behind.slots, (Slots{2}));
  EXPECT_EQ(all_behind.lookup_slots, (Slots{-1, -1, -1}));
  EXPECT_EQ(all_behind.num_behind, 3);
  EXPECT_EQ(plan(lengths, one, {0, 0, 0}, 100, 3).num_tokens, (Slots{300, 0, 0}));
  const cpu::CatchUpPlan one_ready = plan(lengths, one, {0, 0, 51200 - 65}, 0);
  EXPECT_EQ(one_ready.num_tokens, (Slots{(131200 / 32 + 51200 - 2048) / 768, 0, 0}));
  EXPECT_EQ(one_ready.lookup_slots, (Slots{-1, -1, 1}));
}

TEST(CatchUpPlanTest, IndexesMoreOfPromptsIfNoRowDrafts) {
  EXPECT_EQ(plan({500, 300, 0}, {0, 0, 0}, {0, 0, 0}, 50).num_tokens, (Slots{500, 100, 0}));
  EXPECT_EQ(plan({500, 300, 0}, {1, 0, 0}, {0, 0, 0}, 50).num_tokens, (Slots{50, 0, 0}));
}

TEST(RowPackingTest, JoinsSpans) {
  const std::vector<int32_t> items{0, 1, 2, 3, 4}, counts{2, 0, 1};
  const std::vector<int64_t> begins{3, 5, 1};
  std::vector<int32_t> joined(3);
  cpu::join_spans(items.data(), begins.data(), counts.data(), 3, joined.data());
  EXPECT_EQ(joined, (Slots{3, 4, 1}));
}

}  // namespace
}  // namespace ngram_npu::test
