// Tests the packing of rows for ngram_npu._C.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cpu/row_packing.h"

namespace ngram_npu::test {
namespace {

TEST(RowPackingTest, JoinSpansConcatenatesSpans) {
  const std::vector<int32_t> items{0, 1, 2, 3, 4}, counts{2, 0, 1};
  const std::vector<int64_t> begins{3, 5, 1};
  std::vector<int32_t> joined(3);
  cpu::join_spans(items.data(), begins.data(), counts.data(), 3, joined.data());
  EXPECT_EQ(joined, (std::vector<int32_t>{3, 4, 1}));
}

}  // namespace
}  // namespace ngram_npu::test
