// The lookup at every instruction set of this machine, each row flush against a guard page, through the C entry point.
#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/lookup_impl.h"
#include "guard_pages.h"
#include "instruction_sets.h"
#include "lookup_cases.h"

namespace ngram_npu::test {
namespace {

// One row at a time through ngram_propose. The memory is made once: the cases are many and short. Behind a row that is
// flush at the start lies its last token again and again, which does not count.
class RowLookup {
 public:
  explicit RowLookup(Flush flush) : flush_(flush) {}

  Draft operator()(const Tokens& tokens, const LookupOptions& options) {
    const int64_t length = length_of(tokens);
    // With a flush end the row may start at any multiple of 4 bytes. A row that fills the memory is flush at both ends.
    int32_t* row = flush_ == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
    std::copy(tokens.begin(), tokens.end(), row);
    if (flush_ == Flush::kStart && length > 0) {
      std::fill_n(row + length, std::min<int64_t>(150, memory_.size() - length), tokens.back());
    }
    const auto num_tokens = static_cast<int32_t>(length);
    int32_t* draft = drafts_.data() + (flush_ == Flush::kEnd ? drafts_.size() - options.k : 0);
    NgramProposeParams p{};
    const int64_t capacity = flush_ == Flush::kEnd ? length : memory_.size();
    p.token_ids = {row, 1, capacity, capacity};
    p.num_tokens = &num_tokens;
    p.batch = 1;
    p.lookup = options;
    p.draft_token_ids = {draft, p.lookup.k, 4};
    p.num_draft_tokens = counts_.data();
    p.match_len = counts_.data() + 1;
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
    return {Tokens(draft, draft + options.k), counts_.data()[0], counts_.data()[1]};
  }

 private:
  static constexpr int64_t kLongestRow = 3 * 1024;  // whole pages

  Flush flush_;
  Guarded<int32_t> memory_{kLongestRow, Flush::kEnd};
  Guarded<int32_t> drafts_{kMaxDraftTokens, flush_};
  Guarded<int32_t> counts_{2, flush_};
};

class LookupTest : public InstructionSetTest {
 protected:
  // Compares with the definition for both match policies and both edges. Alternates the other options.
  bool check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      LookupOptions options{min_n, max_n, kMaxDraftTokens, kNoLimit, match_policy, false, false, nullptr, 0};
      if (++calls_ % 4 == 0) options.k = 1 + calls_ % 7;
      options.overlap = calls_ % 3 == 0;
      const Draft expected = expected_draft(tokens, options);
      for (RowLookup* lookup : {&at_end_, &at_start_}) {
        const Draft got = (*lookup)(tokens, options);
        if (got == expected) continue;
        ADD_FAILURE() << GetParam() << (lookup == &at_end_ ? ", end" : ", start") << " at a guard, match_policy "
                      << match_policy << ", n " << min_n << ".." << max_n << ", k " << options.k << ", overlap "
                      << options.overlap << "\nrow " << testing::PrintToString(tokens) << "\nexpected "
                      << expected.match_len << ": " << testing::PrintToString(expected.tokens) << "\ngot      "
                      << got.match_len << ": " << testing::PrintToString(got.tokens);
        return false;
      }
    }
    return true;
  }

  auto checker() {
    return [this](const Tokens& tokens, int64_t min_n, int64_t max_n) { return check(tokens, min_n, max_n); };
  }

  RowLookup at_end_{Flush::kEnd};
  RowLookup at_start_{Flush::kStart};
  int64_t calls_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Isa, LookupTest, testing::ValuesIn(instruction_sets()), name_of_instruction_set);

TEST_P(LookupTest, EveryBinaryRow) { every_binary_row(12, checker()); }
TEST_P(LookupTest, EveryHeadAndTail) { every_head_and_tail(checker()); }
TEST_P(LookupTest, RowsOfEveryLength) { rows_of_every_length(checker()); }
TEST_P(LookupTest, PeriodicRows) { periodic_rows(checker()); }
TEST_P(LookupTest, RowsThatRaiseTheBar) { rows_that_raise_the_bar(checker()); }
TEST_P(LookupTest, SingleOccurrences) { single_occurrences(checker()); }
TEST_P(LookupTest, ExtremeTokens) { extreme_tokens(checker()); }

// The memory of a row that cannot draft is not read.
TEST_P(LookupTest, RowsThatMayNotDraftAreNotRead) {
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
  p.lookup = {1, 3, 1, 4096, kLatest, true, false, nullptr, 0};
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
  EXPECT_EQ(Tokens(num_draft, num_draft + 5), Tokens(5, 0));
  EXPECT_EQ(Tokens(drafts, drafts + 5), Tokens(5, -1));
}

// The lookup's own logic at vector widths this machine may lack (NEON's 4 lanes on x86), with vectors written as loops.
// Here the occurrence itself is compared, which drafts over a small alphabet do not always tell apart.
template <int64_t lanes>
struct Emulated {
  static constexpr int64_t kLanes = lanes;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t equal(const int32_t* at, Reg token) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < lanes; ++i) mask |= static_cast<uint64_t>(at[i] == token) << i;
    return mask;
  }
};

template <class Vec>
class LookupLanesTest : public testing::Test {
 protected:
  bool check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    const int64_t length = length_of(tokens);
    if (length < 2) return true;  // the kernel's callers see to that
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      const Occurrence expected = expected_occurrence(tokens, min_n, max_n, match_policy);
      for (const Flush flush : kFlushes) {
        int32_t* row = flush == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
        std::copy(tokens.begin(), tokens.end(), row);
        const Occurrence got = cpu::find_with<Vec>(row, length, min_n, max_n, match_policy);
        if (got.end == expected.end && got.len == expected.len) continue;
        ADD_FAILURE() << Vec::kLanes << " lanes, " << name_of(flush) << ", match_policy " << match_policy << ", n "
                      << min_n << ".." << max_n << "\nrow " << testing::PrintToString(tokens) << "\nexpected end "
                      << expected.end << " length " << expected.len << "\ngot      end " << got.end << " length "
                      << got.len;
        return false;
      }
    }
    return true;
  }

  auto checker() {
    return [this](const Tokens& tokens, int64_t min_n, int64_t max_n) { return check(tokens, min_n, max_n); };
  }

 private:
  Guarded<int32_t> memory_{3 * 1024, Flush::kEnd};
};

using Widths = testing::Types<Emulated<1>, Emulated<4>, Emulated<8>, Emulated<16>, Emulated<64>>;
TYPED_TEST_SUITE(LookupLanesTest, Widths);

TYPED_TEST(LookupLanesTest, EveryBinaryRow) { every_binary_row(11, this->checker()); }
TYPED_TEST(LookupLanesTest, EveryHeadAndTail) { every_head_and_tail(this->checker()); }
TYPED_TEST(LookupLanesTest, RowsOfEveryLength) { rows_of_every_length(this->checker()); }
TYPED_TEST(LookupLanesTest, PeriodicRows) { periodic_rows(this->checker()); }
TYPED_TEST(LookupLanesTest, RowsThatRaiseTheBar) { rows_that_raise_the_bar(this->checker()); }
TYPED_TEST(LookupLanesTest, SingleOccurrences) { single_occurrences(this->checker()); }

}  // namespace
}  // namespace ngram_npu::test
