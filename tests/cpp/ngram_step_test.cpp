// ngram_step_: worked examples through the C entry point, at every instruction set and in every layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "lookup_cases.h"
#include "op_calls.h"

namespace ngram_npu::test {
namespace {

constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

class NgramStepTest : public InstructionSetTest {};
INSTANTIATE_TEST_SUITE_P(Isa, NgramStepTest, testing::ValuesIn(instruction_sets()), name_of_instruction_set);

// One request on a row of six places: 1 2 3 4 2.
StepInputs one(const Tokens& sampled) {
  StepInputs in;
  in.rows = {{1, 2, 3, 4, 2}};
  in.capacity = 8;
  in.sampled = {sampled};
  return in;
}

TEST_P(NgramStepTest, AppendsAndDrafts) {
  const StepResult got = step(one({3, -1, -1}));
  EXPECT_EQ(got.rows[0], filled({1, 2, 3, 4, 2, 3}, 8));
  EXPECT_EQ(got.num_tokens, Tokens{6});
  EXPECT_EQ(got.next, Tokens{3});
  EXPECT_EQ(got.num_sampled, Tokens{1});
  EXPECT_EQ(got.drafts, (Tokens{4, 2, 3, -1}));
  EXPECT_EQ(got.num_draft, Tokens{3});
  EXPECT_EQ(got.match_len, Tokens{2});
}

TEST_P(NgramStepTest, AppendsSeveral) {
  const StepResult got = step(one({3, 4, 2}));
  EXPECT_EQ(got.rows[0], filled({1, 2, 3, 4, 2, 3, 4, 2}, 8));
  EXPECT_EQ(got.num_tokens, Tokens{8});
  EXPECT_EQ(got.next, Tokens{2});
  EXPECT_EQ(got.num_sampled, Tokens{3});
  EXPECT_EQ(got.drafts, (Tokens{3, 4, 2, -1}));
  EXPECT_EQ(got.match_len, Tokens{3});
}

TEST_P(NgramStepTest, OverlapGoesOnIntoTheDraft) {
  StepInputs in = one({3, 4, 2});
  in.lookup = {1, 3, 6, kNoLimit, kLatest, true, false, nullptr, 0};
  EXPECT_EQ(step(in).drafts, (Tokens{3, 4, 2, 3, 4, 2}));
}

TEST_P(NgramStepTest, WithoutAdvanceTheLengthStays) {
  StepInputs in = one({3, -1, -1});
  in.advance = false;
  const StepResult got = step(in);
  EXPECT_EQ(got.rows[0], filled({1, 2, 3, 4, 2, 3}, 8));
  EXPECT_EQ(got.num_tokens, Tokens{5});
  EXPECT_EQ(got.drafts, (Tokens{4, 2, 3, -1}));
}

TEST_P(NgramStepTest, TheLeadingRunEndsAtAHole) {
  const StepResult got = step(one({3, -1, 4}));
  EXPECT_EQ(got.rows[0], filled({1, 2, 3, 4, 2, 3}, 8));
  EXPECT_EQ(got.num_sampled, Tokens{1});
  EXPECT_EQ(got.next, Tokens{3});
}

TEST_P(NgramStepTest, TheVocabularyBoundsWhatIsValid) {
  StepInputs in = one({3, 50, 4});
  in.vocab_size = 50;
  EXPECT_EQ(step(in).num_sampled, Tokens{1});
  in.vocab_size = 51;
  EXPECT_EQ(step(in).num_sampled, Tokens{3});
  in.vocab_size = 0;
  EXPECT_EQ(step(in).num_sampled, Tokens{0});
  in.vocab_size = kMin64;
  EXPECT_EQ(step(in).num_sampled, Tokens{0});
  in = one({0, kMax32, kMin32});
  in.vocab_size = kMax64;
  const StepResult got = step(in);
  EXPECT_EQ(got.num_sampled, Tokens{2});
  EXPECT_EQ(got.next, Tokens{kMax32});
}

// A request without a valid token is not verified in the next step: the row's last token stands, nothing is drafted.
void expect_untouched(const StepInputs& in) {
  const StepResult got = step(in);
  EXPECT_EQ(got.rows[0], filled({1, 2, 3, 4, 2}, 8));
  EXPECT_EQ(got.num_tokens, Tokens{5});
  EXPECT_EQ(got.next, Tokens{2});
  EXPECT_EQ(got.num_sampled, Tokens{0});
  EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1}));
  EXPECT_EQ(got.num_draft, Tokens{0});
  EXPECT_EQ(got.match_len, Tokens{0});
}

TEST_P(NgramStepTest, NoValidToken) {
  expect_untouched(one({-1, -1, -1}));
  expect_untouched(one({-1, 3, 4}));
  expect_untouched(one({kMin32, 3, 4}));
  expect_untouched(one({100, 3, 4}));  // the vocabulary has 100
}

TEST_P(NgramStepTest, Discarded) {
  StepInputs in = one({3, 4, -1});
  for (const uint8_t byte : {uint8_t{1}, uint8_t{2}, uint8_t{255}}) {  // any nonzero byte is true
    in.discard = {byte};
    expect_untouched(in);
  }
  in.discard = {0};
  EXPECT_EQ(step(in).num_sampled, Tokens{2});
}

TEST_P(NgramStepTest, AnEmptyRow) {
  StepInputs in;
  in.rows = {{}, {}, {}, {}};
  in.sampled = {{-1, -1}, {7, -1}, {7, 7}, {7, 7}};
  in.discard = {0, 0, 0, 1};
  const StepResult got = step(in);
  EXPECT_EQ(got.next, (Tokens{0, 7, 7, 0}));
  EXPECT_EQ(got.num_tokens, (Tokens{0, 1, 2, 0}));
  EXPECT_EQ(got.num_draft, (Tokens{0, 0, 1, 0}));
  EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1, -1, -1, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_P(NgramStepTest, TheRowTakesWhatFits) {
  StepInputs in = one({3, 4, 2});
  in.capacity = 6;
  const StepResult got = step(in);
  EXPECT_EQ(got.rows[0], (Tokens{1, 2, 3, 4, 2, 3}));
  EXPECT_EQ(got.num_tokens, Tokens{6});
  EXPECT_EQ(got.next, Tokens{2});         // before the clamp
  EXPECT_EQ(got.num_sampled, Tokens{3});  // before the clamp
  EXPECT_EQ(got.drafts, (Tokens{4, 2, 3, -1}));
}

TEST_P(NgramStepTest, AFullRow) {
  StepInputs in = one({9, -1, -1});
  in.capacity = 5;
  const StepResult got = step(in);
  EXPECT_EQ(got.rows[0], (Tokens{1, 2, 3, 4, 2}));
  EXPECT_EQ(got.num_tokens, Tokens{5});
  EXPECT_EQ(got.next, Tokens{9});
  EXPECT_EQ(got.num_sampled, Tokens{1});
  EXPECT_EQ(got.drafts, (Tokens{3, 4, 2, -1}));  // of the row as it is
}

TEST_P(NgramStepTest, MaxLenCountsTheGrownRow) {
  StepInputs in = one({3, -1, -1});
  in.lookup.max_len = 8;
  EXPECT_EQ(step(in).drafts, (Tokens{4, 2, -1, -1}));
  in.lookup.max_len = 6;
  const StepResult got = step(in);
  EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1}));
  EXPECT_EQ(got.match_len, Tokens{0});
  EXPECT_EQ(got.num_tokens, Tokens{6});  // max_len bounds drafts, not what was sampled
}

TEST_P(NgramStepTest, LengthsThatAreNone) {
  StepInputs in;
  in.capacity = 4;
  in.num_tokens = {-1, kMin32, kMax32, 5, 4, 3};
  in.rows.assign(in.num_tokens.size(), {1, 2, 1, 2});
  in.sampled.assign(in.num_tokens.size(), {1, 2});
  in.lookup.k = 1;
  const StepResult got = step(in);
  EXPECT_EQ(got.rows,
            (std::vector<Tokens>{{1, 2, 1, 2}, {1, 2, 1, 2}, {1, 2, 1, 2}, {1, 2, 1, 2}, {1, 2, 1, 2}, {1, 2, 1, 1}}));
  EXPECT_EQ(got.num_tokens, (Tokens{-1, kMin32, kMax32, 5, 4, 4}));
  EXPECT_EQ(got.next, (Tokens{0, 0, 0, 0, 2, 2}));
  EXPECT_EQ(got.num_sampled, (Tokens{2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1, 1, 2}));
}

TEST_P(NgramStepTest, RowIndices) {
  StepInputs in;
  in.rows = {{5, 6}, {7, 8}, {3, 4}};
  in.sampled = {{7}, {5}};
  in.lookup.k = 1;
  for (const Indices& indices : {Indices::of_int32({1, 0}), Indices::of_int64({1, 0})}) {
    in.row_indices = indices;
    const StepResult got = step(in);
    EXPECT_EQ(got.rows, (std::vector<Tokens>{filled({5, 6, 5}, 16), filled({7, 8, 7}, 16), filled({3, 4}, 16)}));
    EXPECT_EQ(got.num_tokens, (Tokens{3, 3, 2}));
    EXPECT_EQ(got.next, (Tokens{7, 5}));
    EXPECT_EQ(got.drafts, (Tokens{8, 6}));
  }
  in.row_indices = {};  // fewer requests than rows
  EXPECT_EQ(step(in).num_tokens, (Tokens{3, 3, 2}));
}

TEST_P(NgramStepTest, RowsThatAreNone) {
  StepInputs in;
  in.rows = {{5, 6}, {7, 8}};
  in.lookup.k = 1;
  in.sampled.assign(5, {5, -1});
  for (const Indices& indices :
       {Indices::of_int32({-1, 2, kMin32, kMax32, 0}), Indices::of_int64({int64_t{1} << 32, -1, kMin64, kMax64, 0})}) {
    in.row_indices = indices;
    const StepResult got = step(in);
    EXPECT_EQ(got.rows, (std::vector<Tokens>{filled({5, 6, 5}, 16), filled({7, 8}, 16)}));
    EXPECT_EQ(got.num_tokens, (Tokens{3, 2}));
    EXPECT_EQ(got.next, (Tokens{0, 0, 0, 0, 5}));
    EXPECT_EQ(got.num_sampled, (Tokens{1, 1, 1, 1, 1}));
    EXPECT_EQ(got.drafts, (Tokens{-1, -1, -1, -1, 6}));
  }
}

// Values are unspecified, but memory safety holds. (One thread: with several it would be a race of the caller's.)
TEST_P(NgramStepTest, ARowAskedForTwiceIsMemorySafe) {
  StepInputs in;
  in.rows = {{1, 2, 1, 2}, {3}};
  in.capacity = 6;
  in.sampled = {{1, 2, 1}, {2, 1, 2}, {1, 2, 1}, {1, 1, 1}};
  for (const bool advance : {true, false}) {
    in.advance = advance;
    in.row_indices = Indices::of_int64({0, 0, 0, 0});
    for (const Layout layout : kLayouts) {
      const StepResult got = step(in, layout);
      EXPECT_EQ(got.rows[1], filled({3}, 6));
      EXPECT_GE(got.num_tokens[0], 4);
      EXPECT_LE(got.num_tokens[0], 6);
    }
  }
}

TEST_P(NgramStepTest, TheWidestSample) {
  StepInputs in;
  in.rows = {{}};
  in.capacity = 70;
  in.sampled = {Tokens(65, 8)};
  in.lookup = {1, 64, 64, kNoLimit, kEarliest, false, false, nullptr, 0};
  const StepResult got = step(in);
  EXPECT_EQ(got.num_sampled, Tokens{65});
  EXPECT_EQ(got.num_tokens, Tokens{65});
  EXPECT_EQ(got.match_len, Tokens{64});
  EXPECT_EQ(got.num_draft, Tokens{1});
}

TEST_P(NgramStepTest, NothingToDo) {
  StepInputs in;
  in.rows = {{1, 2}};
  const StepResult got = step(in);  // no requests
  EXPECT_EQ(got.rows[0], filled({1, 2}, 16));
  EXPECT_EQ(got.num_tokens, Tokens{2});
  EXPECT_TRUE(got.next.empty());
  in.rows = {};  // no rows
  in.sampled = {{4}};
  in.row_indices = Indices::of_int32({0});
  EXPECT_EQ(step(in).num_sampled, Tokens{1});
  EXPECT_EQ(step(in).next, Tokens{0});
}

// A tensor without elements may have no memory at all.
TEST_P(NgramStepTest, RowsWithoutCapacity) {
  int32_t num_tokens[] = {0, 0, 1};
  const int32_t sampled[] = {4, -1, 4};
  int32_t next[3], num_sampled[3], drafts[3], num_draft[3], match_len[3];
  NgramStepParams p{};
  p.token_ids = {nullptr, 3, 0, 1};
  p.num_tokens = num_tokens;
  p.sampled_token_ids = {sampled, 3, 1, 1};
  p.batch = 3;
  p.advance = true;
  p.vocab_size = 10;
  p.lookup = {1, 1, 1, kNoLimit, kEarliest, false, false, nullptr, 0};
  p.next_token_ids = next;
  p.num_sampled = num_sampled;
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_step_(&p, nullptr), kOk);
  EXPECT_EQ(Tokens(num_tokens, num_tokens + 3), (Tokens{0, 0, 1}));
  EXPECT_EQ(Tokens(next, next + 3), (Tokens{4, 0, 0}));
  EXPECT_EQ(Tokens(num_sampled, num_sampled + 3), (Tokens{1, 0, 1}));
  EXPECT_EQ(Tokens(drafts, drafts + 3), (Tokens{-1, -1, -1}));
}

// The definition of ngram_step_, request by request.
StepResult expected_step(const StepInputs& in) {
  StepResult want;
  for (const Tokens& row : in.rows) want.rows.push_back(filled(row, in.capacity));
  want.num_tokens = in.num_tokens;
  for (size_t i = 0; i < in.sampled.size(); ++i) {
    Tokens valid;
    for (const int32_t token : in.sampled[i]) {
      if (token < 0 || token >= in.vocab_size || (!in.discard.empty() && in.discard[i] != 0)) break;
      valid.push_back(token);
    }
    want.num_sampled.push_back(static_cast<int32_t>(valid.size()));
    Draft draft = no_draft(in.lookup.k);
    int32_t next = 0;
    const int64_t index = in.row_indices.bytes > 0 ? in.row_indices.values[i] : static_cast<int64_t>(i);
    const auto r = static_cast<size_t>(index);
    if (index >= 0 && r < in.rows.size() && in.num_tokens[r] >= 0 && in.num_tokens[r] <= in.capacity) {
      Tokens row(want.rows[r].begin(), want.rows[r].begin() + in.num_tokens[r]);
      if (!row.empty()) next = row.back();
      if (!valid.empty()) next = valid.back();
      for (const int32_t token : valid) {
        if (length_of(row) < in.capacity) row.push_back(token);
      }
      std::copy(row.begin(), row.end(), want.rows[r].begin());
      if (in.advance) want.num_tokens[r] = static_cast<int32_t>(row.size());
      if (!valid.empty()) draft = expected_draft(row, in.lookup);
    }
    want.next.push_back(next);
    append(want.drafts, draft.tokens);
    want.num_draft.push_back(draft.count);
    want.match_len.push_back(draft.match_len);
  }
  return want;
}

TEST_P(NgramStepTest, RandomBatches) {
  Random random(99);
  for (int round = 0; round < 120; ++round) {
    StepInputs in;
    const int64_t rows = 1 + random.below(6);
    in.capacity = 1 + random.below(80);
    for (int64_t r = 0; r < rows; ++r) {
      in.rows.push_back(random.row(in.capacity, 3));
      in.num_tokens.push_back(static_cast<int32_t>(random.below(in.capacity + 3) - 1));  // -1 and S+1 now and then
    }
    std::vector<int64_t> order;
    for (int64_t r = 0; r < rows; ++r) order.push_back(random.below(8) == 0 ? rows + r : r);
    for (int64_t r = rows - 1; r > 0; --r) {
      std::swap(order[static_cast<size_t>(r)], order[static_cast<size_t>(random.below(r + 1))]);
    }
    if (const int64_t kind = random.below(3); kind > 0) {
      in.row_indices = kind == 1 ? Indices::of_int32(order) : Indices::of_int64(order);
    }
    const int64_t width = 1 + random.below(9);
    for (int64_t i = 0; i < rows; ++i) {
      Tokens sampled = random.row(width, 3);
      for (int64_t j = random.below(width + 1); j < width; ++j) sampled[static_cast<size_t>(j)] = -1;
      in.sampled.push_back(sampled);
      if (round % 2 == 0) in.discard.push_back(random.below(4) == 0);
    }
    in.advance = random.below(2) == 0;
    in.vocab_size = 2 + random.below(2);
    const int64_t min_n = 1 + random.below(3);
    in.lookup = {min_n,
                 min_n + random.below(6),
                 1 + random.below(9),
                 random.below(90),
                 static_cast<int32_t>(random.below(2)),
                 random.below(2) == 0,
                 false,
                 nullptr,
                 0};
    const StepResult want = expected_step(in);
    const StepResult got = step(in);
    ASSERT_EQ(got.rows, want.rows) << "round " << round;
    ASSERT_EQ(got.num_tokens, want.num_tokens) << "round " << round;
    ASSERT_EQ(got.next, want.next) << "round " << round;
    ASSERT_EQ(got.num_sampled, want.num_sampled) << "round " << round;
    ASSERT_EQ(got.drafts, want.drafts) << "round " << round;
    ASSERT_EQ(got.num_draft, want.num_draft) << "round " << round;
    ASSERT_EQ(got.match_len, want.match_len) << "round " << round;
  }
}

}  // namespace
}  // namespace ngram_npu::test
