// Checks that the guards work, since other tests rely on them. EXPECT_DEATH accepts a signal as well as a sanitizer's
// report: ASan and TSan handle SIGSEGV themselves and exit.
#include "guard_pages.h"

#include <gtest/gtest.h>

namespace ngram_npu::test {
namespace {

class GuardPagesDeathTest : public testing::TestWithParam<Flush> {
 protected:
  // Re-executes the binary: a fork of a process with threads (a sanitizer's) could hang.
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

INSTANTIATE_TEST_SUITE_P(Guards, GuardPagesDeathTest, testing::ValuesIn(kFlushes));

void touch(const volatile int32_t* at) { static_cast<void>(*at); }

TEST_P(GuardPagesDeathTest, WritingOneTooFarFaults) {
  const Guarded<int32_t> array(7, GetParam());
  volatile int32_t* outside = GetParam() == Flush::kEnd ? array.data() + 7 : array.data() - 1;
  EXPECT_DEATH(*outside = 1, "");
}

TEST_P(GuardPagesDeathTest, EveryRowHasItsGuard) {
  const GuardedRows<int32_t> rows(3, 5, GetParam());
  for (int64_t r = 0; r < 3; ++r) {
    touch(rows[r]);
    touch(rows[r] + 4);
    EXPECT_DEATH(touch(GetParam() == Flush::kEnd ? rows[r] + 5 : rows[r] - 1), "");
  }
}

TEST_P(GuardPagesDeathTest, WholePagesAreGuardedAtBothEnds) {
  const int64_t size = sysconf(_SC_PAGESIZE) / 4;
  const Guarded<int32_t> array(size, GetParam());
  touch(array.data());
  touch(array.data() + size - 1);
  EXPECT_DEATH(touch(array.data() - 1), "");
  EXPECT_DEATH(touch(array.data() + size), "");
}

TEST_P(GuardPagesDeathTest, AnEmptyArrayPointsAtAGuard) {
  const Guarded<int32_t> array(0, GetParam());
  EXPECT_DEATH(touch(array.data()), "");
}

TEST_P(GuardPagesDeathTest, FrozenMemoryCanBeReadAndNotWritten) {
  Guarded<int32_t> array(std::vector<int32_t>{1, 2, 3}, GetParam());
  array.freeze();
  touch(array.data() + 1);
  EXPECT_DEATH(*const_cast<volatile int32_t*>(array.data() + 1) = 5, "");
}

TEST_P(GuardPagesDeathTest, CanariesSeeAWriteBehindTheOtherEdge) {
  const Guarded<int32_t> array(7, GetParam());
  EXPECT_TRUE(array.intact());
  array.data()[GetParam() == Flush::kEnd ? -1 : 7] = 0;
  EXPECT_FALSE(array.intact());
}

}  // namespace
}  // namespace ngram_npu::test
