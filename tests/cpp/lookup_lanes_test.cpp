// The lookup's own logic at vector widths this machine may lack (NEON's 4 lanes on x86), with vectors written as loops.
// Here the occurrence itself is compared, which drafts over a small alphabet do not always tell apart.
#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/lookup_impl.h"
#include "guard_pages.h"
#include "lookup_cases.h"

namespace ngram_npu::test {
namespace {

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
