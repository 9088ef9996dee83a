// Tests the vector calls of the model: their results, and the faults that they report.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::CMPMODE;
using AscendC::Duplicate;

template <class T>
void fill(const LocalTensor<T>& t, const std::vector<T>& values) {
  sync_all_pipes();
  for (uint32_t i = 0; i < values.size(); ++i) t.SetValue(i, values[i]);
  sync_all_pipes();
}

template <class T>
std::vector<T> read_elements(const LocalTensor<T>& t, uint32_t count) {
  std::vector<T> elements;
  for (uint32_t i = 0; i < count; ++i) elements.push_back(read_element(t, i));
  return elements;
}

// Expects that a call with a count of 1 writes `expected` to the first element, and does not change the second element.
template <class To, class From, class Call>
void expect_result(To expected, From a, From b, const Call& call) {
  EXPECT_CLEAN([=] {
    Scratch<From> s(64);
    const LocalTensor<From> other = s.template allocate<From>(64);
    const LocalTensor<To> out = s.template allocate<To>(64);
    const To second = read_element(out, 1);
    fill(s.tensor, std::vector<From>{a});
    fill(other, std::vector<From>{b});
    call(out, s.tensor, other);
    EXPECT_EQ(read_element(out, 0), expected);
    EXPECT_EQ(read_element(out, 1), second);
  });
}

// The parity suite tests ordinary values. At the limits of the types, the kernels rely on documented behaviour.
TEST(Vector, CallsAtLimitsOfTypesGiveDocumentedResults) {
  using namespace AscendC;
  expect_result(INT32_MAX, INT32_MIN, 1, [](auto out, auto a, auto b) { Sub(out, a, b, 1); });
  expect_result(0, 1 << 20, 0, [](auto out, auto a, auto) { Muls(out, a, 1 << 12, 1); });
  expect_result(-1, INT32_MIN, 0, [](auto out, auto a, auto) { ShiftRight(out, a, 31, 1); });
  expect_result(1u, 0x80000000u, 0u, [](auto out, auto a, auto) { ShiftRight(out, a, 31u, 1); });
}

TEST(Vector, InvalidOperandsAreReported) {
  EXPECT_FAULT("a count of 0",
               make_scratch_kernel<int32_t>([](auto& s) { AscendC::Sub(s.tensor, s.tensor, s.tensor, 0); }));
  EXPECT_FAULT("overlap", make_scratch_kernel<int32_t>([](auto& s) { AscendC::Muls(s.tensor[8], s.tensor, 1, 9); }));
  EXPECT_CLEAN(make_scratch_kernel<int32_t>([](auto& s) { AscendC::Muls(s.tensor[8], s.tensor, 1, 8); }));
  EXPECT_FAULT("by 33 bits",
               make_scratch_kernel<int32_t>([](auto& s) { AscendC::ShiftLeft(s.tensor, s.tensor, 33, 8); }));
  EXPECT_FAULT("by -1 bits",
               make_scratch_kernel<int32_t>([](auto& s) { AscendC::ShiftRight(s.tensor, s.tensor, -1, 8); }));
}

TEST(Vector, CompareScalarWritesBitsAndReportsInvalidCounts) {
  const auto make_kernel = [](uint32_t count) {
    return [count] {
      Scratch<int32_t> s(256);
      const LocalTensor<uint8_t> bits = s.allocate<uint8_t>(32, false);
      s.tensor.SetValue(3, 9);
      s.tensor.SetValue(64, 9);
      sync_all_pipes();
      AscendC::CompareScalar(bits, s.tensor, 9, CMPMODE::EQ, count);
      EXPECT_EQ(read_element(bits, 0), 8);
      if (count > 64) {
        EXPECT_EQ(read_element(bits, 8), 1);
      }
      EXPECT_EQ(read_element(bits, 7), 0);
    };
  };
  EXPECT_CLEAN(make_kernel(64));
  EXPECT_CLEAN(make_kernel(128));
  EXPECT_FAULT("expected a multiple of 256 bytes", make_kernel(65));
  EXPECT_FAULT("expected a multiple of 256 bytes", make_kernel(0));
}

// The result bit of a poisoned element is poison; the other bits of the byte are not.
TEST(Vector, CompareScalarPropagatesPoisonToOneBit) {
  const auto make_kernel = [](uint8_t mask) {
    return [mask] {
      Scratch<int32_t> s(64, false);
      Duplicate(s.tensor, 7, 60);
      const LocalTensor<uint8_t> bits = s.allocate<uint8_t>(32);
      const LocalTensor<uint8_t> masks = s.allocate<uint8_t>(32);
      AscendC::CompareScalar(bits, s.tensor, 7, CMPMODE::EQ, 64);
      fill(masks, {0, 0, 0, 0, 0, 0, 0, mask});
      const LocalTensor<uint16_t> out = bits.ReinterpretCast<uint16_t>();
      AscendC::And(out, out, masks.ReinterpretCast<uint16_t>(), 4);
      EXPECT_EQ(read_element(bits, 7), mask & 0x0F);
    };
  };
  EXPECT_CLEAN(make_kernel(0x0F));
  EXPECT_FAULT("uninitialized UB", make_kernel(0x1F));
}

TEST(Vector, GatherCopiesElementsAndReportsInvalidOffsets) {
  const auto make_kernel = [](uint32_t offset, uint32_t base) {
    return [offset, base] {
      Scratch<int32_t> s(64);
      const LocalTensor<int32_t> out = s.allocate<int32_t>(64);
      const LocalTensor<uint32_t> offsets = s.allocate<uint32_t>(64);
      fill(s.tensor, {0, 10, 20, 30});
      fill(offsets, {offset, 0});
      AscendC::Gather(out, s.tensor, offsets, base, 2);
      EXPECT_EQ(read_elements(out, 3), (std::vector<int32_t>{static_cast<int32_t>(offset + base) * 10 / 4,
                                                             static_cast<int32_t>(base) * 10 / 4, 1}));
    };
  };
  EXPECT_CLEAN(make_kernel(12, 0));
  EXPECT_CLEAN(make_kernel(8, 4));
  EXPECT_FAULT("byte offset 256 into 256", make_kernel(256, 0));
  EXPECT_FAULT("byte offset 256 into 256", make_kernel(252, 4));
  EXPECT_FAULT("byte offset 2 into", make_kernel(2, 0));
  EXPECT_FAULT("overlap", make_scratch_kernel<int32_t>([](auto& s) {
                 AscendC::Gather(s.tensor, s.tensor, s.template allocate<uint32_t>(64), 0, 8);
               }));
  EXPECT_FAULT("uninitialized UB", make_scratch_kernel<int32_t>([](auto& s) {
                 const auto out = s.template allocate<int32_t>(64);
                 AscendC::Gather(out, s.tensor, s.template allocate<uint32_t>(64, false), 0, 8);
               }));
  EXPECT_FAULT("more than 255 repeats", make_scratch_kernel<int32_t>([](auto& s) {
                 const auto out = s.template allocate<int32_t>(64), offsets = s.template allocate<int32_t>(64);
                 AscendC::Gather(out, s.tensor, offsets.template ReinterpretCast<uint32_t>(), 0, 256 * 64);
               }));
}

TEST(ScalarUnit, CallsAtLimitsGiveDocumentedResults) {
  EXPECT_EQ(AscendC::ScalarGetSFFValue<1>(0), -1);
  EXPECT_EQ(AscendC::ScalarCountLeadingZero(0), 64);
}

}  // namespace
}  // namespace ngram_npu::twin
