// Tests C++ code for ngram_npu._C: the row recogniser, the index policy, and the packing of rows.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "cpu/index_policy.h"
#include "cpu/row_packing.h"
#include "cpu/row_recognizer.h"

namespace ngram_npu::test {
namespace {

constexpr int64_t kCapacity = 40;

// A token buffer of a model runner.
class TokenBuffer {
 public:
  explicit TokenBuffer(int64_t rows) : rows_(rows), tokens_(static_cast<size_t>(rows * kCapacity)), lengths_(rows) {}

  // Puts the first `length` tokens of a request into a row. Requests differ in every token.
  void put_request(size_t row, int32_t request, int32_t length) {
    std::iota(&tokens_[row * kCapacity], &tokens_[row * kCapacity] + length, request * 1000);
    lengths_[row] = length;
  }

  std::vector<int32_t> assign_slots(cpu::RowRecognizer* recognizer, std::vector<int32_t> num_sampled) {
    std::vector<int32_t> slots(num_sampled.size());
    new_rows = recognizer->assign_slots({tokens_.data(), rows_, kCapacity, kCapacity}, lengths_.data(),
                                        num_sampled.data(), static_cast<int64_t>(num_sampled.size()), slots.data());
    return slots;
  }

  std::vector<int64_t> new_rows;

 private:
  int64_t rows_;
  std::vector<int32_t> tokens_, lengths_;
};

using Slots = std::vector<int32_t>;
using NewRows = std::vector<int64_t>;

TEST(RowRecognizerTest, FindsRequestsThatStayedMovedAndGrew) {
  cpu::RowRecognizer recognizer(6);
  TokenBuffer buffer(3);
  for (int32_t r = 0; r < 3; ++r) buffer.put_request(static_cast<size_t>(r), r + 1, 10 + r);
  EXPECT_EQ(buffer.assign_slots(&recognizer, {0, 0, 0}), (Slots{0, 1, 2}));
  EXPECT_EQ(buffer.new_rows, (NewRows{0, 1, 2}));
  // The request of row 0 stays, those of rows 1 and 2 swap rows. The last request also grew in a step without a draft
  // call.
  buffer.put_request(0, 1, 12);
  buffer.put_request(1, 3, 16);
  buffer.put_request(2, 2, 12);
  EXPECT_EQ(buffer.assign_slots(&recognizer, {2, 1, 1}), (Slots{0, 2, 1}));
  EXPECT_TRUE(buffer.new_rows.empty());
  EXPECT_EQ(recognizer.row_slots(), (Slots{0, 2, 1}));
  // A row whose text differs from the slot's text, or is shorter, has a new request.
  buffer.put_request(0, 7, 13);
  buffer.put_request(1, 3, 15);
  EXPECT_EQ(buffer.assign_slots(&recognizer, {1, 1, 0}), (Slots{3, 4, 1}));
  EXPECT_EQ(buffer.new_rows, (NewRows{0, 1}));
}

TEST(RowRecognizerTest, ReusesSlotOfRequestAbsentLongest) {
  cpu::RowRecognizer recognizer(2);
  TokenBuffer buffer(1);
  for (const int32_t request : {1, 2, 1}) {
    buffer.put_request(0, request, 10);
    EXPECT_EQ(buffer.assign_slots(&recognizer, {0}), (Slots{request - 1}));
  }
  buffer.put_request(0, 3, 10);
  EXPECT_EQ(buffer.assign_slots(&recognizer, {0}), (Slots{1}));
}

TEST(RowRecognizerTest, FreesSlotsOfRequestsAbsentForLongerThanGivenSteps) {
  cpu::RowRecognizer recognizer(3);
  TokenBuffer buffer(1);
  for (const int32_t request : {1, 2, 3}) {
    buffer.put_request(0, request, 10);
    buffer.assign_slots(&recognizer, {0});
  }
  EXPECT_EQ(recognizer.free_absent_slots(1), (Slots{0}));
  EXPECT_EQ(recognizer.free_absent_slots(1), (Slots{}));
  EXPECT_EQ(recognizer.free_absent_slots(0), (Slots{1}));
}

TEST(RowRecognizerTest, IgnoresRowsWithInvalidLengths) {
  cpu::RowRecognizer recognizer(4);
  TokenBuffer buffer(2);
  buffer.put_request(0, 1, 10);
  buffer.put_request(1, 2, 10);
  EXPECT_EQ(buffer.assign_slots(&recognizer, {0, 11}), (Slots{0, 1}));  // more sampled tokens than tokens
  EXPECT_EQ(buffer.assign_slots(&recognizer, {0, -1}), (Slots{0, 2}));
  EXPECT_EQ(buffer.new_rows, (NewRows{1}));
}

TEST(IndexPolicyTest, ScansStepsWithFewTokensAndStepsWhoseRowsAreAllBehind) {
  cpu::IndexPolicy policy;
  policy.max_scan_tokens = 1280;
  EXPECT_EQ(policy.compute_budget_steps(1, 1280, 1, 0, true), 0);
  EXPECT_EQ(policy.compute_budget_steps(1, 1281, 1, 0, true), 1);
  EXPECT_EQ(policy.compute_budget_steps(1, 2000, 200, 0, true), 0);
  EXPECT_EQ(policy.compute_budget_steps(1, 2001, 200, 0, true), 1);
  EXPECT_EQ(policy.compute_budget_steps(3, 9000, 2, 2, true), 0);
  EXPECT_EQ(policy.compute_budget_steps(4, 9000, 2, 2, true), 4);
  EXPECT_EQ(policy.compute_budget_steps(3, 9000, 2, 1, true), 1);
  EXPECT_EQ(policy.compute_budget_steps(3, 9000, 2, 2, false), 1);
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

TEST(RowPackingTest, PackRowsFillsLastChunkOfEachRowWithUnusedItems) {
  const std::vector<int32_t> items{5, -1, 3, -1, 9};
  const auto* data = reinterpret_cast<const char*>(items.data());
  // The rows are: every other item; no items, but two chunks; one item.
  const std::vector<cpu::SourceRow> rows{{data, 8, 3, 0, 7}, {data, 4, 0, 65, 20}, {data + 8, 4, 1, 0, 30}};
  std::vector<int64_t> destinations(4);
  std::vector<int32_t> chunks(4 * cpu::kChunkItems);
  EXPECT_EQ(cpu::pack_rows(rows, 1, destinations.data(), chunks.data()), 3);
  EXPECT_EQ(destinations, (NewRows{7, 20, 21, 30}));
  std::vector<int32_t> expected(chunks.size(), cpu::kUnusedItem);
  expected[0] = 5, expected[1] = 3, expected[2] = 9, expected[3 * cpu::kChunkItems] = 3;
  EXPECT_EQ(chunks, expected);
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
