// Tests C++ code for ngram_npu._C: the index policy and the packing of rows.
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
  EXPECT_EQ(policy.compute_budget_factor(1, 1280, 1, 0, true), 0);
  EXPECT_EQ(policy.compute_budget_factor(1, 1281, 1, 0, true), 1);
  EXPECT_EQ(policy.compute_budget_factor(1, 2000, 200, 0, true), 0);
  EXPECT_EQ(policy.compute_budget_factor(1, 2001, 200, 0, true), 1);
  EXPECT_EQ(policy.compute_budget_factor(3, 9000, 2, 2, true), 0);
  EXPECT_EQ(policy.compute_budget_factor(4, 9000, 2, 2, true), 4);
  EXPECT_EQ(policy.compute_budget_factor(3, 9000, 2, 1, true), 1);
  EXPECT_EQ(policy.compute_budget_factor(3, 9000, 2, 2, false), 1);
}

TEST(IndexPolicyTest, KeepsAbsentRequestsLongerIfLessMemoryIsInUse) {
  const cpu::IndexPolicy policy;
  EXPECT_EQ(policy.compute_steps_to_keep_absent(1, 0.5, true), -1);
  EXPECT_EQ(policy.compute_steps_to_keep_absent(64, 0.5, false), -1);
  EXPECT_EQ(policy.compute_steps_to_keep_absent(64, 0.5, true), 64);
  EXPECT_EQ(policy.compute_steps_to_keep_absent(1, 0.6, false), 64);
  EXPECT_EQ(policy.compute_steps_to_keep_absent(1, 0.95, false), 0);
}

// Makes a plan for three rows with the slots 2, 0 and 1. indexed: number of indexed tokens per row.
cpu::CatchUpPlan make_plan(std::vector<int32_t> num_tokens, std::vector<int32_t> num_sampled,
                           std::vector<int64_t> indexed, int64_t min_index_budget, int64_t steps = 1) {
  cpu::IndexPolicy policy;
  policy.min_index_budget = min_index_budget;
  policy.prefill_index_budget = 600;
  const std::vector<int32_t> slots{2, 0, 1};
  return cpu::plan_catch_up(policy, num_tokens.data(), num_sampled.data(), slots.data(), indexed, steps);
}

TEST(CatchUpPlanTest, BudgetIsOneThirtySecondOfAScanAndTheTimeSavedByLookups) {
  const std::vector<int32_t> lengths{50000, 30000, 51200}, one_sampled{1, 1, 1};
  constexpr int32_t kBudget = 131200 / 32 / 768;
  const cpu::CatchUpPlan plan_without_index = make_plan(lengths, one_sampled, {0, 0, 0}, 0);
  EXPECT_EQ(plan_without_index.num_tokens, (Slots{kBudget, 0, 0}));
  EXPECT_EQ(plan_without_index.rows, (NewRows{0}));
  EXPECT_EQ(plan_without_index.slots, (Slots{2}));
  EXPECT_EQ(plan_without_index.lookup_slots, (Slots{-1, -1, -1}));
  EXPECT_EQ(plan_without_index.num_behind, 3);
  EXPECT_EQ(make_plan(lengths, one_sampled, {0, 0, 0}, 100, 3).num_tokens, (Slots{300, 0, 0}));
  const cpu::CatchUpPlan plan_with_indexed_row = make_plan(lengths, one_sampled, {0, 0, 51200 - 65}, 0);
  EXPECT_EQ(plan_with_indexed_row.num_tokens, (Slots{(131200 / 32 + 51200 - 2048) / 768, 0, 0}));
  EXPECT_EQ(plan_with_indexed_row.lookup_slots, (Slots{-1, -1, 1}));
}

TEST(CatchUpPlanTest, BudgetIsLargerIfNoRowDrafts) {
  EXPECT_EQ(make_plan({500, 300, 0}, {0, 0, 0}, {0, 0, 0}, 50).num_tokens, (Slots{500, 100, 0}));
  EXPECT_EQ(make_plan({500, 300, 0}, {1, 0, 0}, {0, 0, 0}, 50).num_tokens, (Slots{50, 0, 0}));
}

TEST(RowPackingTest, JoinSpansConcatenatesSpans) {
  const std::vector<int32_t> items{0, 1, 2, 3, 4}, counts{2, 0, 1};
  const std::vector<int64_t> begins{3, 5, 1};
  std::vector<int32_t> joined(3);
  cpu::join_spans(items.data(), begins.data(), counts.data(), 3, joined.data());
  EXPECT_EQ(joined, (Slots{3, 4, 1}));
}

}  // namespace
}  // namespace ngram_npu::test
