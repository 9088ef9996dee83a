// Choosing the instruction set. The environment is read once, at first use, so these tests run in separate processes.
#include "cpu/instruction_set.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace ngram_npu::test {
namespace {

TEST(InstructionSetTest, ScalarIsEverywhereAndAutoIsTheWidest) {
  const std::string widest = ngram_npu_cpu_instruction_set();
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("scalar"), kOk);
  EXPECT_STREQ(ngram_npu_cpu_instruction_set(), "scalar");
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("auto"), kOk);
  EXPECT_EQ(ngram_npu_cpu_instruction_set(), widest);
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  EXPECT_EQ(widest, avx512 ? "avx512" : __builtin_cpu_supports("avx2") ? "avx2" : "scalar");
#elif defined(__aarch64__)
  EXPECT_EQ(widest, "neon");
#endif
}

TEST(InstructionSetTest, AnUnknownNameChangesNothing) {
  ASSERT_EQ(ngram_npu_cpu_set_instruction_set("scalar"), kOk);
  for (const char* name : {"", "sse9", "AVX2", "scalar "}) {
    EXPECT_EQ(ngram_npu_cpu_set_instruction_set(name), kInvalidParams) << name;
    EXPECT_STREQ(ngram_npu_cpu_instruction_set(), "scalar");
  }
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set(nullptr), kInvalidParams);
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("auto"), kOk);
}

// Exits with 0 if the first result is the expected one.
[[noreturn]] void first_answer(const char* wish, const std::string& expected) {
  setenv("NGRAM_NPU_INSTRUCTION_SET", wish, 1);
  std::_Exit(ngram_npu_cpu_instruction_set() == expected ? 0 : 1);
}

TEST(InstructionSetDeathTest, TheEnvironmentChooses) {
  // Re-executed, so that the child has not chosen yet.
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(first_answer("scalar", "scalar"), testing::ExitedWithCode(0), "");
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    EXPECT_EXIT(first_answer("avx2", "avx2"), testing::ExitedWithCode(0), "");
  }
#endif
}

TEST(InstructionSetDeathTest, ANonsenseEnvironmentMeansTheWidest) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("NGRAM_NPU_INSTRUCTION_SET", "nonsense", 1);
        const std::string first = ngram_npu_cpu_instruction_set();
        ngram_npu_cpu_set_instruction_set("auto");
        std::_Exit(first == ngram_npu_cpu_instruction_set() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ngram_npu::test
