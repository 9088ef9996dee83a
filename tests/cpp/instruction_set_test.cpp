// Choosing the instruction set. What the environment says: tests/core/test_doctor.py.
#include "cpu/instruction_set.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ngram_npu::test
