// ngram_propose: worked examples through the C entry point, at every instruction set and in every layout.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "op_calls.h"

namespace ngram_npu::test {
namespace {

constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

class NgramProposeTest : public InstructionSetTest {};
INSTANTIATE_TEST_SUITE_P(Isa, NgramProposeTest, testing::ValuesIn(instruction_sets()), name_of_instruction_set);

LookupOptions options(int64_t min_n, int64_t max_n, int64_t k, MatchPolicy match_policy = kEarliest,
                      bool overlap = false, int64_t max_len = kNoLimit) {
  return {min_n, max_n, k, max_len, match_policy, overlap, false, nullptr, 0};
}

// One row, one answer.
void expect(const Tokens& row, const LookupOptions& lookup, const Tokens& drafts, int32_t count, int32_t match_len) {
  ProposeInputs in;
  in.rows = {row};
  in.lookup = lookup;
  const ProposeResult got = propose(in);
  EXPECT_EQ(got.drafts, drafts) << testing::PrintToString(row);
  EXPECT_EQ(got.num_draft, Tokens{count}) << testing::PrintToString(row);
  EXPECT_EQ(got.match_len, Tokens{match_len}) << testing::PrintToString(row);
}

TEST_P(NgramProposeTest, WhatFollowedLastTime) {
  //  1 [2 3] 4 | 2 3   ->  4 2 3, then the row ends
  expect({1, 2, 3, 4, 2, 3}, options(1, 3, 4), {4, 2, 3, -1}, 3, 2);
  expect({1, 2, 3, 4, 2, 3}, options(1, 3, 2), {4, 2}, 2, 2);
}

TEST_P(NgramProposeTest, EarliestAndLatest) {
  expect({5, 1, 6, 1, 7, 1}, options(1, 1, 4, kEarliest), {6, 1, 7, 1}, 4, 1);
  expect({5, 1, 6, 1, 7, 1}, options(1, 1, 4, kLatest), {7, 1, -1, -1}, 2, 1);
}

TEST_P(NgramProposeTest, TheLongerMatchWinsWhereverItIs) {
  expect({3, 7, 2, 3, 8, 9, 3, 5, 2, 3}, options(1, 2, 2, kEarliest), {8, 9}, 2, 2);
  expect({3, 7, 2, 3, 8, 9, 3, 5, 2, 3}, options(1, 2, 2, kLatest), {8, 9}, 2, 2);
}

TEST_P(NgramProposeTest, MatchesAreCappedAtMaxN) {
  // Matches longer than max_n count as equal: the first of them is used.
  expect({3, 7, 2, 3, 8, 2, 3}, options(1, 1, 2, kEarliest), {7, 2}, 2, 1);
  expect({3, 7, 2, 3, 8, 2, 3}, options(1, 2, 2, kEarliest), {8, 2}, 2, 2);
}

TEST_P(NgramProposeTest, ShorterThanMinNIsNoMatch) {
  expect({1, 2, 3, 9, 3}, options(2, 3, 2), {-1, -1}, 0, 0);
  expect({1, 2, 3, 9, 3}, options(1, 3, 2), {9, 3}, 2, 1);
}

TEST_P(NgramProposeTest, AnOccurrenceMayOverlapTheSuffix) {
  expect({3, 3, 3}, options(1, 3, 4), {3, -1, -1, -1}, 1, 2);
  expect({1, 2, 1, 2, 1}, options(1, 4, 4), {2, 1, -1, -1}, 2, 3);
}

TEST_P(NgramProposeTest, OverlapGoesOnIntoItsOwnDraft) {
  expect({3, 3, 3}, options(1, 3, 4, kEarliest, true), {3, 3, 3, 3}, 4, 2);
  expect({1, 2, 1, 2, 1}, options(1, 4, 5, kEarliest, true), {2, 1, 2, 1, 2}, 5, 3);
  expect({1, 2, 3, 4, 2, 3}, options(1, 3, 8, kEarliest, true), {4, 2, 3, 4, 2, 3, 4, 2}, 8, 2);
}

TEST_P(NgramProposeTest, MaxLenClampsTheDraft) {
  const Tokens row = {1, 2, 3, 4, 2, 3};  // six tokens
  expect(row, options(1, 3, 4, kEarliest, true, 9), {4, 2, 3, -1}, 3, 2);
  expect(row, options(1, 3, 4, kEarliest, false, 8), {4, 2, -1, -1}, 2, 2);
  expect(row, options(1, 3, 4, kEarliest, false, 7), {4, -1, -1, -1}, 1, 2);
  expect(row, options(1, 3, 4, kEarliest, false, 6), {-1, -1, -1, -1}, 0, 0);
  expect(row, options(1, 3, 4, kEarliest, false, 5), {-1, -1, -1, -1}, 0, 0);
  expect(row, options(1, 3, 4, kEarliest, false, 0), {-1, -1, -1, -1}, 0, 0);
  expect(row, options(1, 3, 4, kEarliest, true, kMin64), {-1, -1, -1, -1}, 0, 0);
  expect(row, options(1, 3, 4, kEarliest, true, kMax64), {4, 2, 3, 4}, 4, 2);
}

TEST_P(NgramProposeTest, TheLimitsOfNAndK) {
  Tokens row(200, 4);
  row[0] = 1;
  ProposeInputs in;
  in.rows = {row};
  in.capacity = 200;
  in.lookup = options(64, 64, 64, kEarliest, false);
  const ProposeResult got = propose(in);
  EXPECT_EQ(got.drafts, Tokens(64, 4));
  EXPECT_EQ(got.num_draft, Tokens{64});
  EXPECT_EQ(got.match_len, Tokens{64});
}

TEST_P(NgramProposeTest, TokenIdsAreCopiedVerbatim) {
  expect({-1, kMin32, kMax32, 0, -1}, options(1, 1, 4), {kMin32, kMax32, 0, -1}, 4, 1);
  expect({kMin32, -7, kMin32}, options(1, 1, 2), {-7, kMin32}, 2, 1);
}

TEST_P(NgramProposeTest, LengthsThatAreNone) {
  const Tokens row = {1, 2, 1, 2, 1, 2, 1, 2};
  ProposeInputs in;
  in.capacity = 8;
  in.lookup = options(1, 2, 2);
  in.num_tokens = {0, 1, -1, kMin32, 9, kMax32, 8, 3};
  in.rows.assign(in.num_tokens.size(), row);
  const ProposeResult got = propose(in);
  EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 2, 2, 1}));
  EXPECT_EQ(got.num_draft, (Tokens{0, 0, 0, 0, 0, 0, 2, 2}));
  EXPECT_EQ(got.match_len, (Tokens{0, 0, 0, 0, 0, 0, 2, 1}));
}

TEST_P(NgramProposeTest, RequestsThatSampledNothingDraftNothing) {
  ProposeInputs in;
  in.rows.assign(4, {5, 6, 5});
  in.num_sampled = {1, 0, 255, -2};
  in.lookup = options(1, 1, 1);
  const ProposeResult got = propose(in);
  EXPECT_EQ(got.drafts, (Tokens{6, -1, 6, -1}));
  EXPECT_EQ(got.num_draft, (Tokens{1, 0, 1, 0}));
  EXPECT_EQ(got.match_len, (Tokens{1, 0, 1, 0}));
}

TEST_P(NgramProposeTest, RowIndices) {
  ProposeInputs in;
  in.rows = {{5, 6, 5}, {7, 8, 7}, {1, 2, 3}};
  in.lookup = options(1, 1, 1);
  EXPECT_EQ(propose(in).drafts, (Tokens{6, 8, -1}));
  const std::vector<int64_t> order = {1, 2, 0, 1, 1};  // more requests than rows, and a repeated row
  for (const Indices& indices : {Indices::of_int32(order), Indices::of_int64(order)}) {
    in.row_indices = indices;
    const ProposeResult got = propose(in);
    EXPECT_EQ(got.drafts, (Tokens{8, -1, 6, 8, 8}));
    EXPECT_EQ(got.num_draft, (Tokens{1, 0, 1, 1, 1}));
  }
  in.row_indices = Indices::of_int32({2});
  EXPECT_EQ(propose(in).drafts, (Tokens{-1}));
}

TEST_P(NgramProposeTest, RowsThatAreNone) {
  ProposeInputs in;
  in.rows = {{5, 6, 5}, {7, 8, 7}};
  in.lookup = options(1, 1, 1);
  in.row_indices = Indices::of_int32({-1, 0, 2, kMin32, kMax32, 1});
  EXPECT_EQ(propose(in).drafts, (Tokens{-1, 6, -1, -1, -1, 8}));
  // An index whose low 32 bits would be a row is not a row.
  in.row_indices = Indices::of_int64({-1, int64_t{1} << 32, (int64_t{1} << 32) + 1, kMin64, kMax64, 1});
  EXPECT_EQ(propose(in).drafts, (Tokens{-1, -1, -1, -1, -1, 8}));
}

TEST_P(NgramProposeTest, NothingToDo) {
  ProposeInputs in;
  EXPECT_TRUE(propose(in).drafts.empty());  // no rows
  in.row_indices = Indices::of_int32({0, 0});
  EXPECT_EQ(propose(in).num_draft, (Tokens{0, 0}));  // requests without rows
  in.rows = {{1, 1}};
  in.row_indices = Indices::of_int32({});
  EXPECT_TRUE(propose(in).drafts.empty());  // rows without requests
}

// The memory of a row that cannot draft is not read.
TEST_P(NgramProposeTest, RowsThatMayNotDraftAreNotRead) {
  GuardedRows<int32_t> rows(5, 4096, Flush::kEnd);
  rows.hide();
  const int32_t num_tokens[] = {4000, 1, 0, 4097, 4096};
  const int32_t num_sampled[] = {0, 1, 1, 1, 1};
  int32_t drafts[5], num_draft[5], match_len[5];
  NgramProposeParams p{};
  p.token_ids = rows.view<const int32_t>();
  p.num_tokens = num_tokens;
  p.num_sampled = num_sampled;
  p.batch = 5;
  p.lookup = options(1, 3, 1, kLatest, true, 4096);
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
  EXPECT_EQ(Tokens(num_draft, num_draft + 5), Tokens(5, 0));
  EXPECT_EQ(Tokens(drafts, drafts + 5), Tokens(5, -1));
}

// A tensor without elements may have no memory at all.
TEST_P(NgramProposeTest, RowsWithoutCapacity) {
  const int32_t num_tokens[] = {0, 1, 2};
  int32_t drafts[3], num_draft[3], match_len[3];
  NgramProposeParams p{};
  p.token_ids = {nullptr, 3, 0, 1};
  p.num_tokens = num_tokens;
  p.batch = 3;
  p.lookup = options(1, 1, 1);
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(drafts[i], -1);
    EXPECT_EQ(num_draft[i], 0);
    EXPECT_EQ(match_len[i], 0);
  }
}

}  // namespace
}  // namespace ngram_npu::test
