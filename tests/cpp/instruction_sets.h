// C entry points of the CPU library, and the base class of test suites that run once per supported instruction set.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "choices.h"
#include "core/drafting.h"
#include "cpu/machine.h"
#include "oracle.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const ngram_npu::NgramProposeParams* params, void* stream);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const ngram_npu::NgramStepParams* params, void* stream);

namespace ngram_npu::test {

// Returns the names of the instruction sets that this machine supports.
inline std::vector<std::string> list_instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"scalar", "avx2", "avx512", "neon"}) {
    if (ngram_npu_cpu_set_instruction_set(name) == kOk) names.emplace_back(name);
  }
  ngram_npu_cpu_set_instruction_set("auto");
  return names;
}

inline std::string get_instruction_set_name(const testing::TestParamInfo<std::string>& info) { return info.param; }

class InstructionSetTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_EQ(ngram_npu_cpu_set_instruction_set(GetParam().c_str()), kOk);
    ASSERT_EQ(ngram_npu_cpu_instruction_set(), GetParam());
  }
  void TearDown() override { ngram_npu_cpu_set_instruction_set("auto"); }
};

inline Tokens make_random_row(RandomChoices& random, int64_t length, int64_t vocab_size) {
  Tokens tokens(static_cast<size_t>(length));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(vocab_size));
  return tokens;
}

constexpr int64_t kNoLimit = int64_t{1} << 40;  // value of max_len that limits no draft
constexpr int64_t kAnyToken = INT32_MAX;        // default of vocab_size

}  // namespace ngram_npu::test
