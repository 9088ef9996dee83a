// The CPU library's C entry points, and the suites that run once per instruction set of this machine.
//
// Calls for hand-written examples: inputs and outputs are placed between guard pages, in every layout; memory that must
// not be written is read-only, and every layout must give the same results.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/ngram_propose.h"
#include "core/ngram_step.h"
#include "cpu/instruction_set.h"
#include "guard_pages.h"
#include "oracle.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const ngram_npu::NgramProposeParams* params, void* stream);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const ngram_npu::NgramStepParams* params, void* stream);

namespace ngram_npu::test {

inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"scalar", "avx2", "avx512", "neon"}) {
    if (ngram_npu_cpu_set_instruction_set(name) == kOk) names.emplace_back(name);
  }
  ngram_npu_cpu_set_instruction_set("auto");
  return names;
}

inline std::string name_of_instruction_set(const testing::TestParamInfo<std::string>& info) { return info.param; }

class InstructionSetTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_EQ(ngram_npu_cpu_set_instruction_set(GetParam().c_str()), kOk);
    ASSERT_EQ(ngram_npu_cpu_instruction_set(), GetParam());
  }
  void TearDown() override { ngram_npu_cpu_set_instruction_set("auto"); }
};

constexpr int64_t kNoLimit = int64_t{1} << 40;  // a max_len without effect
constexpr int32_t kFiller = 1000003;            // contents of a row after its tokens
constexpr int32_t kGarbage = 0x7B7B7B7B;        // contents of outputs before the call

// Indices as the caller has them: absent, int32 or int64.
struct Indices {
  int32_t bytes = 0;
  std::vector<int64_t> values;

  static Indices of_int32(std::vector<int64_t> v) { return {4, std::move(v)}; }
  static Indices of_int64(std::vector<int64_t> v) { return {8, std::move(v)}; }
};

// Placement of rows: each against a guard at its end or start, or as slices of a larger buffer.
enum class Layout { kFlushEnd, kFlushStart, kSliceEnd, kSliceStart };
constexpr Layout kLayouts[] = {Layout::kFlushEnd, Layout::kFlushStart, Layout::kSliceEnd, Layout::kSliceStart};

inline Flush flush_of(Layout layout) {
  return layout == Layout::kFlushEnd || layout == Layout::kSliceEnd ? Flush::kEnd : Flush::kStart;
}

struct ProposeInputs {
  std::vector<Tokens> rows;
  int64_t capacity = 16;
  std::vector<int32_t> num_tokens;  // empty: the rows' sizes
  Indices row_indices;
  std::vector<int32_t> num_sampled;  // empty: absent
  LookupOptions lookup{1, 3, 4, kNoLimit, kEarliest, false, false, nullptr, 0};
};

struct ProposeResult {
  Tokens drafts;  // [B, k]
  Tokens num_draft;
  Tokens match_len;

  bool operator==(const ProposeResult& o) const {
    return drafts == o.drafts && num_draft == o.num_draft && match_len == o.match_len;
  }
};

// Calls in one layout, or in all of them, with equal results.
ProposeResult propose(const ProposeInputs& in, Layout layout);
ProposeResult propose(const ProposeInputs& in);

struct StepInputs {
  std::vector<Tokens> rows;
  int64_t capacity = 16;
  std::vector<int32_t> num_tokens;  // empty: the rows' sizes
  std::vector<Tokens> sampled;      // all of one width
  std::vector<uint8_t> discard;     // empty: absent
  Indices row_indices;
  bool advance = true;
  int64_t vocab_size = 100;
  LookupOptions lookup{1, 3, 4, kNoLimit, kEarliest, false, false, nullptr, 0};
};

struct StepResult {
  std::vector<Tokens> rows;  // whole rows, after the step
  Tokens num_tokens;
  Tokens next;
  Tokens num_sampled;
  Tokens drafts;  // [B, k]
  Tokens num_draft;
  Tokens match_len;

  bool operator==(const StepResult& o) const {
    return rows == o.rows && num_tokens == o.num_tokens && next == o.next && num_sampled == o.num_sampled &&
           drafts == o.drafts && num_draft == o.num_draft && match_len == o.match_len;
  }
};

StepResult step(const StepInputs& in, Layout layout);
StepResult step(const StepInputs& in);

// A row of the capacity the inputs have, as results show it.
inline Tokens filled(Tokens tokens, int64_t capacity) {
  tokens.resize(static_cast<size_t>(capacity), kFiller);
  return tokens;
}

}  // namespace ngram_npu::test
