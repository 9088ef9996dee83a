// The vector calls: their results and the faults they report.
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
std::vector<T> values(const LocalTensor<T>& t, uint32_t count) {
  std::vector<T> all;
  for (uint32_t i = 0; i < count; ++i) all.push_back(value_of(t, i));
  return all;
}

// Checks a call's result of one element; the next one must not change.
template <class To, class From, class Call>
void expect_result(To expected, From a, From b, const Call& call) {
  EXPECT_CLEAN([=] {
    Scratch<From> s(64);
    const LocalTensor<From> other = s.template allocate<From>(64);
    const LocalTensor<To> out = s.template allocate<To>(64);
    const To next = value_of(out, 1);
    fill(s.tensor, std::vector<From>{a});
    fill(other, std::vector<From>{b});
    call(out, s.tensor, other);
    EXPECT_EQ(value_of(out, 0), expected);
    EXPECT_EQ(value_of(out, 1), next);
  });
}

// The parity suite compares ordinary results. These are the limits, where the kernels rely on the documents.
TEST(Vector, ResultsAtTheLimits) {
  using namespace AscendC;
  expect_result(INT32_MIN, INT32_MAX, 1, [](auto out, auto a, auto b) { Add(out, a, b, 1); });
  expect_result(INT32_MAX, INT32_MIN, 1, [](auto out, auto a, auto b) { Sub(out, a, b, 1); });
  expect_result(0, 1 << 20, 1 << 12, [](auto out, auto a, auto b) { Mul(out, a, b, 1); });
  expect_result(-1, INT32_MIN, 0, [](auto out, auto a, auto) { ShiftRight(out, a, 31, 1); });
  expect_result(1u, 0x80000000u, 0u, [](auto out, auto a, auto) { ShiftRight(out, a, 31u, 1); });
  expect_result(16777216.0f, (1 << 24) + 1, 0, [](auto out, auto a, auto) { Cast(out, a, RoundMode::CAST_RINT, 1); });
  expect_result(INT32_MAX, int64_t{1} << 40, int64_t{0},
                [](auto out, auto a, auto) { Cast(out, a, RoundMode::CAST_NONE, 1); });
  expect_result(uint8_t{255}, half(300.0f), half(0.0f),
                [](auto out, auto a, auto) { Cast(out, a, RoundMode::CAST_RINT, 1); });
  EXPECT_FAULT("does not round this way",
               on<int64_t>([](auto& s) { Cast(s.template allocate<int32_t>(64), s.tensor, RoundMode::CAST_RINT, 1); }));
  static_assert(cast_row(kHalf, kU8)->modes(2201) == (kPlain | kRint) && cast_row(kHalf, kU8)->modes(3510) == kRint);
}

TEST(Vector, Operands) {
  EXPECT_FAULT("a count of 0", on<int32_t>([](auto& s) { AscendC::Add(s.tensor, s.tensor, s.tensor, 0); }));
  EXPECT_FAULT("overlap", on<int32_t>([](auto& s) { AscendC::Adds(s.tensor[8], s.tensor, 1, 9); }));
  EXPECT_CLEAN(on<int32_t>([](auto& s) { AscendC::Adds(s.tensor[8], s.tensor, 1, 8); }));
  EXPECT_FAULT("by 33 bits", on<int32_t>([](auto& s) { AscendC::ShiftLeft(s.tensor, s.tensor, 33, 8); }));
  EXPECT_FAULT("by -1 bits", on<int32_t>([](auto& s) { AscendC::ShiftRight(s.tensor, s.tensor, -1, 8); }));
}

TEST(Vector, Compare) {
  const auto kernel = [](uint32_t count) {
    return [count] {
      Scratch<int32_t> s(256);
      const LocalTensor<uint8_t> bits = s.allocate<uint8_t>(32, false);
      s.tensor.SetValue(3, 9);
      s.tensor.SetValue(64, 9);
      sync_all_pipes();
      AscendC::CompareScalar(bits, s.tensor, 9, CMPMODE::EQ, count);
      EXPECT_EQ(value_of(bits, 0), 8);
      if (count > 64) {
        EXPECT_EQ(value_of(bits, 8), 1);
      }
      EXPECT_EQ(value_of(bits, 7), 0);
    };
  };
  EXPECT_CLEAN(kernel(64));
  EXPECT_CLEAN(kernel(128));
  EXPECT_FAULT("left over of 256 bytes", kernel(65));
  EXPECT_FAULT("left over of 256 bytes", kernel(0));
}

// The result bit of a poisoned element is poison; its neighbours in the byte are not.
TEST(Vector, ComparePoison) {
  const auto kernel = [](uint8_t mask) {
    return [mask] {
      Scratch<int32_t> s(64, false);
      Duplicate(s.tensor, 7, 60);
      const LocalTensor<uint8_t> bits = s.allocate<uint8_t>(32);
      const LocalTensor<uint8_t> masks = s.allocate<uint8_t>(32);
      AscendC::CompareScalar(bits, s.tensor, 7, CMPMODE::EQ, 64);
      fill(masks, {0, 0, 0, 0, 0, 0, 0, mask});
      const LocalTensor<uint16_t> out = bits.ReinterpretCast<uint16_t>();
      AscendC::And(out, out, masks.ReinterpretCast<uint16_t>(), 4);
      EXPECT_EQ(value_of(bits, 7), mask & 0x0F);
    };
  };
  EXPECT_CLEAN(kernel(0x0F));
  EXPECT_FAULT("nothing has computed", kernel(0x1F));
}

TEST(Vector, Gather) {
  const auto kernel = [](uint32_t offset, uint32_t base) {
    return [offset, base] {
      Scratch<int32_t> s(64);
      const LocalTensor<int32_t> out = s.allocate<int32_t>(64);
      const LocalTensor<uint32_t> offsets = s.allocate<uint32_t>(64);
      fill(s.tensor, {0, 10, 20, 30});
      fill(offsets, {offset, 0});
      AscendC::Gather(out, s.tensor, offsets, base, 2);
      EXPECT_EQ(values(out, 3), (std::vector<int32_t>{static_cast<int32_t>(offset + base) * 10 / 4,
                                                      static_cast<int32_t>(base) * 10 / 4, 1}));
    };
  };
  EXPECT_CLEAN(kernel(12, 0));
  EXPECT_CLEAN(kernel(8, 4));
  EXPECT_FAULT("byte offset 256 into 256", kernel(256, 0));
  EXPECT_FAULT("byte offset 256 into 256", kernel(252, 4));
  EXPECT_FAULT("byte offset 2 into", kernel(2, 0));
  EXPECT_FAULT("overlap", on<int32_t>([](auto& s) {
                 AscendC::Gather(s.tensor, s.tensor, s.template allocate<uint32_t>(64), 0, 8);
               }));
  EXPECT_FAULT("nothing has computed", on<int32_t>([](auto& s) {
                 const auto out = s.template allocate<int32_t>(64);
                 AscendC::Gather(out, s.tensor, s.template allocate<uint32_t>(64, false), 0, 8);
               }));
  EXPECT_FAULT("more than 255 repeats", on<int32_t>([](auto& s) {
                 const auto out = s.template allocate<int32_t>(64), offsets = s.template allocate<int32_t>(64);
                 AscendC::Gather(out, s.tensor, offsets.template ReinterpretCast<uint32_t>(), 0, 256 * 64);
               }));
}

TEST(Vector, Reduce) {
  const auto kernel = [](uint32_t work) {
    return [work] {
      Scratch<float> s(1024);
      const LocalTensor<float> out = s.allocate<float>(8, false);
      const LocalTensor<float> temporary = s.allocate<float>(work);
      fill(s.tensor, {0, 5, -1, 5});
      AscendC::ReduceMax(out, s.tensor, temporary, 1024);
      EXPECT_EQ(value_of(out, 0), 5.0f);
    };
  };
  EXPECT_CLEAN(kernel(16));
  EXPECT_FAULT("of a tensor of 32 bytes", kernel(8));
  const auto reduced = [](auto& s) {
    const auto temporary = s.template allocate<float>(64);
    AscendC::ReduceMax(s.template allocate<float>(8), s.tensor, temporary, 64);
    return temporary;
  };
  EXPECT_CLEAN(on<float>(reduced));
  EXPECT_FAULT("nothing has computed", on<float>(reduced, false));
  // The work buffer is poison afterwards.
  EXPECT_FAULT("nothing has computed", on<float>([reduced](auto& s) { value_of(reduced(s), 0); }));
}

TEST(ScalarUnit, LimitsAndRounding) {
  EXPECT_EQ(AscendC::ScalarGetSFFValue<1>(0), -1);
  EXPECT_EQ(AscendC::ScalarCountLeadingZero(0), 64);
  EXPECT_EQ((AscendC::ScalarCast<float, int32_t, AscendC::RoundMode::CAST_RINT>(2.5f)), 2);
}

TEST(Half, RoundTripsAndRounding) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float f = half_to_float(static_cast<uint16_t>(bits));
    if (f == f) {
      ASSERT_EQ(float_to_half(f), bits);
    }
  }
  EXPECT_EQ(float_to_half(2049.0f), float_to_half(2048.0f));  // a tie goes to even
  EXPECT_EQ(float_to_half(2051.0f), float_to_half(2052.0f));
  EXPECT_EQ(float_to_half(1e6f), 0x7C00);
  EXPECT_NE(float_to_half(0x1p-25f), 1);
}

}  // namespace
}  // namespace ngram_npu::twin
