// The vector calls that compare, look up, convert and reduce.
#pragma once

#include <cmath>
#include <limits>

#include "vector.h"

namespace AscendC {

// The 910B takes every mode for EQ where it compares int32.
enum class CMPMODE : uint8_t { EQ = 2 };
enum class RoundMode : uint8_t { CAST_NONE = 0, CAST_RINT };

}  // namespace AscendC

namespace ngram_npu::twin {

template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, half> || std::is_same_v<To, float>) {
    return To(static_cast<float>(value));
  } else {
    using Wide = std::conditional_t<std::is_integral_v<From>, int64_t, double>;
    Wide wide = static_cast<Wide>(value);
    if constexpr (!std::is_integral_v<From>) wide = std::isnan(wide) ? 0 : std::nearbyint(wide);
    if (wide <= static_cast<Wide>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (wide >= static_cast<Wide>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return static_cast<To>(wide);
  }
}

}  // namespace ngram_npu::twin

namespace AscendC {

// One bit per element, the lowest bit of a byte first.
template <class T, class U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE, uint32_t count) {
  NGRAM_TWIN_OFFERED(kCompareScalar, T);
  static_assert(std::is_same_v<U, uint8_t>, "bits come as uint8_t");
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "CompareScalar");
  const uint64_t bytes = uint64_t{count} * sizeof(T);
  NGRAM_TWIN_CHECK(count >= 1 && bytes % kRepeatBytes == 0,
                   "block %d: CompareScalar of %u elements: the chip silently skips what is left over of 256 bytes",
                   core.block(), count);
  check_overlap(core, dst.place(), count / 8, src0.place(), bytes, false);
  const uint8_t* a = core.read(src0.place(), bytes);
  const bool poison = any_poison(core.shadow(a), bytes);
  uint8_t* d = core.write(dst.place(), count / 8);
  std::memset(d, 0, count / 8);
  std::memset(core.shadow(d), 0, count / 8);
  for (uint32_t i = 0; i < count; ++i) {
    const auto bit = static_cast<uint8_t>(1 << i % 8);
    if (load<T>(a, i) == src1Scalar) d[i / 8] |= bit;
    if (poison && any_poison(core.shadow(a) + i * sizeof(T), sizeof(T))) core.shadow(d)[i / 8] |= bit;
  }
  core.vector_cost(bytes);
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
  const uint32_t mode = roundMode == RoundMode::CAST_NONE ? ngram_npu::twin::kPlain : ngram_npu::twin::kRint;
  NGRAM_TWIN_CHECK((row->modes(kChip.arch) & mode) != 0, "block %d: Cast: this conversion does not round this way",
                   Core::current().block());
  ngram_npu::twin::unary("Cast", dst, src, count, [](U value) { return ngram_npu::twin::converted<T>(value); });
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
    store<T>(d, i, static_cast<T>(static_cast<uint64_t>(firstValue) + i));
  }
  core.cost.scalar_ub += kBlockBytes / sizeof(T);
  for (uint64_t done = 0; done < n * sizeof(T); done += kRepeatBytes) core.vector_cost(kRepeatBytes);
}

// Each pass of the device's library leaves one value per 256 bytes in the work buffer.
template <class T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count) {
  NGRAM_TWIN_OFFERED(kReduceMax, T);
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "ReduceMax");
  const uint64_t n = checked_count(core, count);
  const uint64_t work = round_up(round_up(n * sizeof(T), kRepeatBytes) / kRepeatBytes * sizeof(T), kBlockBytes);
  check_overlap(core, sharedTmpBuffer.place(), work, src.place(), n * sizeof(T), false);
  check_overlap(core, dst.place(), sizeof(T), sharedTmpBuffer.place(), work, false);
  const uint8_t* a = core.read(src.place(), n * sizeof(T));
  if (any_poison(core.shadow(a), n * sizeof(T))) core.poisoned();
  std::memset(core.shadow(core.write(sharedTmpBuffer.place(), work)), 0xFF, work);
  T most = load<T>(a, 0);
  for (uint64_t i = 1; i < n; ++i) most = greater(most, load<T>(a, i));
  uint8_t* d = core.write(dst.place(), sizeof(T), sizeof(T));
  std::memset(core.shadow(d), 0, sizeof(T));
  store<T>(d, 0, most);
  core.vector_cost(n * sizeof(T));
  core.vector_cost(work);
}

}  // namespace AscendC
