// The vector calls that compare, look up, convert and reduce.
#pragma once

#include <cmath>
#include <limits>

#include "vector.h"

namespace AscendC {

enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class RoundMode : uint8_t { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

}  // namespace AscendC

namespace ngram_npu::twin {

template <class T>
bool compare(AscendC::CMPMODE mode, T a, T b) {
  using Mode = AscendC::CMPMODE;
  switch (mode) {
    case Mode::LT: return a < b;
    case Mode::GT: return b < a;
    case Mode::EQ: return a == b;
    case Mode::LE: return a <= b;
    case Mode::GE: return b <= a;
    default: return !(a == b);
  }
}

// One bit per element, the lowest bit of a byte first. `bits` are the shadow bits of b's element i.
template <class T, class At, class PoisonAt>
void compare_bits(const char* what, const AscendC::LocalTensor<uint8_t>& dst, const AscendC::LocalTensor<T>& src0,
                  AscendC::CMPMODE mode, uint32_t count, At b_at, PoisonAt poison_at) {
  Core& core = Core::current();
  NGRAM_TWIN_CHECK(count >= 1 && uint64_t{count} * sizeof(T) % kRepeatBytes == 0,
                   "block %d: %s of %u elements: the chip silently skips what is left over of 256 bytes", core.block(),
                   what, count);
  constexpr bool only_eq = kChip.compares_int32_only_eq && std::is_same_v<T, int32_t>;
  NGRAM_TWIN_CHECK(!only_eq || mode == AscendC::CMPMODE::EQ, "block %d: %s of int32: the chip takes every mode for EQ",
                   core.block(), what);
  const uint64_t bytes = uint64_t{count} * sizeof(T);
  check_overlap(core, dst.place(), count / 8, src0.place(), bytes, false);
  const uint8_t* a = core.read(src0.place(), bytes);
  uint8_t* d = core.write(dst.place(), count / 8);
  const bool poison = any_poison(core.shadow(a), bytes) || poison_at(0, count);
  for (uint32_t byte = 0; byte < count / 8; ++byte) {
    uint32_t bits = 0;
    for (uint32_t bit = 0; bit < 8; ++bit)
      bits |= static_cast<uint32_t>(compare<T>(mode, load<T>(a, byte * 8 + bit), b_at(byte * 8 + bit))) << bit;
    d[byte] = static_cast<uint8_t>(bits);
  }
  uint8_t* ds = core.shadow(d);
  std::memset(ds, 0, count / 8);
  for (uint32_t i = 0; poison && i < count; ++i)
    if (any_poison(core.shadow(a) + i * sizeof(T), sizeof(T)) || poison_at(i, 1))
      ds[i / 8] = static_cast<uint8_t>(ds[i / 8] | 1 << i % 8);
  core.vector_cost(bytes);
}

template <class To, class From>
To converted(From value, AscendC::RoundMode mode) {
  if constexpr (std::is_same_v<To, half> || std::is_same_v<To, float>) {
    return To(static_cast<float>(value));
  } else if constexpr (std::is_integral_v<From>) {
    const int64_t wide = static_cast<int64_t>(value);
    const int64_t low = static_cast<int64_t>(std::numeric_limits<To>::min());
    const int64_t high = static_cast<int64_t>(std::numeric_limits<To>::max());
    return static_cast<To>(wide < low ? low : wide > high ? high : wide);
  } else {
    double real = static_cast<double>(static_cast<float>(value));
    using Mode = AscendC::RoundMode;
    switch (mode) {
      case Mode::CAST_FLOOR: real = std::floor(real); break;
      case Mode::CAST_CEIL: real = std::ceil(real); break;
      case Mode::CAST_ROUND: real = std::round(real); break;
      case Mode::CAST_TRUNC: real = std::trunc(real); break;
      default: real = std::nearbyint(real);
    }
    if (std::isnan(real)) return To{0};
    if (real <= static_cast<double>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (real >= static_cast<double>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return static_cast<To>(real);
  }
}

// Elements of the work buffer that the reduction uses. Each pass of the device's library leaves one value (and one
// index) per 256 bytes of the previous pass.
template <class T>
uint64_t reduce_workspace(uint64_t count, bool with_index) {
  constexpr uint64_t per_block = kBlockBytes / sizeof(T);
  constexpr uint64_t per_repeat = kRepeatBytes / sizeof(T);
  const uint64_t first = (count + per_repeat - 1) / per_repeat;
  if (!with_index) return round_up(first, per_block);
  const uint64_t one = first * 2;
  const uint64_t two = (one + per_repeat - 1) / per_repeat * 2;
  const uint64_t three = (two + per_repeat - 1) / per_repeat * 2;
  return round_up(one, per_block) + round_up(two, per_block) + round_up(three, per_block);
}

template <class T, class Better>
void reduce(const char* what, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
            const AscendC::LocalTensor<T>& temporary, int64_t count, bool with_index, Better better) {
  Core& core = Core::current();
  core.issue(kV, what);
  const uint64_t n = checked_count(core, count);
  constexpr bool is_half = std::is_same_v<T, half>;
  NGRAM_TWIN_CHECK(!with_index || !is_half || n <= 65536, "block %d: %s: an index beyond what a half's 16 bits hold",
                   core.block(), what);
  const uint64_t work = reduce_workspace<T>(n, with_index) * sizeof(T);
  const uint64_t results = (with_index ? 2 : 1) * sizeof(T);
  check_overlap(core, temporary.place(), work, src.place(), n * sizeof(T), false);
  check_overlap(core, dst.place(), results, temporary.place(), work, false);
  const uint8_t* a = core.read(src.place(), n * sizeof(T));
  if (any_poison(core.shadow(a), n * sizeof(T))) core.poisoned();
  std::memset(core.shadow(core.write(temporary.place(), work)), 0xFF, work);
  uint64_t best = 0;
  for (uint64_t i = 1; i < n; ++i)
    if (better(load<T>(a, i), load<T>(a, best))) best = i;
  const T value = load<T>(a, best);
  uint8_t* d = core.write(dst.place(), results, sizeof(T));
  std::memset(core.shadow(d), 0, results);
  store<T>(d, 0, value);
  if (with_index) std::memcpy(d + sizeof(T), &best, sizeof(T));
  core.vector_cost(n * sizeof(T));
  core.vector_cost(work);
}

}  // namespace ngram_npu::twin

namespace AscendC {

template <class T, class U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             uint32_t count) {
  NGRAM_TWIN_OFFERED(kCompare, T);
  static_assert(std::is_same_v<U, uint8_t>, "bits come as uint8_t");
  Core& core = Core::current();
  core.issue(ngram_npu::twin::kV, "Compare");
  const uint8_t* b = core.read(src1.place(), uint64_t{count} * sizeof(T));
  ngram_npu::twin::compare_bits<T>(
      "Compare", dst, src0, cmpMode, count, [b](uint32_t i) { return ngram_npu::twin::load<T>(b, i); },
      [&core, b](uint32_t i, uint32_t n) {
        return ngram_npu::twin::any_poison(core.shadow(b) + i * sizeof(T), n * sizeof(T));
      });
}
template <class T, class U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
                   uint32_t count) {
  NGRAM_TWIN_OFFERED(kCompareScalar, T);
  static_assert(std::is_same_v<U, uint8_t>, "bits come as uint8_t");
  Core::current().issue(ngram_npu::twin::kV, "CompareScalar");
  ngram_npu::twin::compare_bits<T>(
      "CompareScalar", dst, src0, cmpMode, count, [src1Scalar](uint32_t) { return src1Scalar; },
      [](uint32_t, uint32_t) { return false; });
}

template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const uint32_t srcBaseOffset, const uint32_t count) {
  NGRAM_TWIN_OFFERED(kGather, T);
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "Gather");
  const uint64_t n = checked_count(core, count);
  constexpr uint64_t per_repeat = kRepeatBytes / sizeof(T);
  NGRAM_TWIN_CHECK(n / per_repeat <= kMaxRepeats, "block %d: Gather of %u elements is more than %u repeats",
                   core.block(), count, kMaxRepeats);
  const uint64_t from_bytes = src.GetSize() * sizeof(T);
  check_overlap(core, dst.place(), n * sizeof(T), src.place(), from_bytes, false);
  check_overlap(core, dst.place(), n * sizeof(T), srcOffset.place(), n * sizeof(uint32_t), false);
  const uint8_t* offsets = core.read(srcOffset.place(), n * sizeof(uint32_t));
  if (any_poison(core.shadow(offsets), n * sizeof(uint32_t))) core.poisoned();
  const uint8_t* a = core.read(src.place(), from_bytes);
  uint8_t* d = core.write(dst.place(), n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t at = uint64_t{load<uint32_t>(offsets, i)} + srcBaseOffset;
    NGRAM_TWIN_CHECK(at % sizeof(T) == 0 && at + sizeof(T) <= from_bytes,
                     "block %d: Gather: byte offset %llu into %llu bytes", core.block(),
                     static_cast<unsigned long long>(at), static_cast<unsigned long long>(from_bytes));
    std::memcpy(d + i * sizeof(T), a + at, sizeof(T));
    std::memcpy(core.shadow(d) + i * sizeof(T), core.shadow(a) + at, sizeof(T));
  }
  core.vector_cost(n * sizeof(T), Speed::kGather);
}

template <class T, class U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count) {
  constexpr const ngram_npu::twin::CastRow* row =
      ngram_npu::twin::cast_row(ngram_npu::twin::dtype_of<U>(), ngram_npu::twin::dtype_of<T>());
  static_assert(row != nullptr, "this chip does not offer this conversion");
  const RoundMode mode = roundMode;
  NGRAM_TWIN_CHECK(row->rounding != ngram_npu::twin::kNever || mode == RoundMode::CAST_NONE,
                   "block %d: Cast: this conversion takes no rounding mode", Core::current().block());
  NGRAM_TWIN_CHECK(row->rounding != ngram_npu::twin::kAlways || mode != RoundMode::CAST_NONE,
                   "block %d: Cast: this conversion needs a rounding mode", Core::current().block());
  ngram_npu::twin::unary("Cast", dst, src, count,
                         [mode](U value) { return ngram_npu::twin::converted<T>(value, mode); });
}

// The device writes the first block with scalars and the rest with vectors, and orders the two itself.
template <class T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count) {
  NGRAM_TWIN_OFFERED(kCreateVecIndex, T);
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "CreateVecIndex");
  const uint64_t n = checked_count(core, count);
  uint8_t* d = core.write(dst.place(), n * sizeof(T));
  std::memset(core.shadow(d), 0, n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) {
    if constexpr (std::is_integral_v<T>) {
      store<T>(d, i, static_cast<T>(static_cast<uint64_t>(firstValue) + i));
    } else {
      store<T>(d, i, T(static_cast<float>(firstValue) + static_cast<float>(i)));
    }
  }
  core.cost.scalar_ub += kBlockBytes / sizeof(T);
  for (uint64_t done = 0; done < n * sizeof(T); done += kRepeatBytes) core.vector_cost(kRepeatBytes);
}

template <class T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count, bool calIndex = false) {
  NGRAM_TWIN_OFFERED(kReduceMax, T);
  ngram_npu::twin::reduce("ReduceMax", dst, src, sharedTmpBuffer, count, calIndex, [](T a, T b) { return b < a; });
}
template <class T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count, bool calIndex = false) {
  NGRAM_TWIN_OFFERED(kReduceMin, T);
  ngram_npu::twin::reduce("ReduceMin", dst, src, sharedTmpBuffer, count, calIndex, [](T a, T b) { return a < b; });
}

}  // namespace AscendC
