// The host twin's counterpart of the device library's header of this name: the part of Ascend C that the kernels use,
// with the open headers' signatures, and strict. docs/design/ascendc-twin.md states what it can and cannot check.
#pragma once

#include <cmath>
#include <limits>

#include "pipe.h"

#define __global__
#define __aicore__
#define __gm__

struct Part;  // the 950's headers need one from its compiler

constexpr int KERNEL_TYPE_AIV_ONLY = 0;
#define KERNEL_TASK_TYPE_DEFAULT(value) static_assert(value == KERNEL_TYPE_AIV_ONLY, "the twin has vector cores only")

// The vector unit: element by element, with poison propagated.
namespace ngram_npu::twin {

inline bool any_poison(const uint8_t* shadow, uint64_t bytes) {
  uint64_t any = 0;
  uint64_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, shadow + i, 8);
    any |= word;
  }
  for (; i < bytes; ++i) any |= shadow[i];
  return any != 0;
}

template <class T>
T load(const uint8_t* at, uint64_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(uint8_t* at, uint64_t i, T value) {
  std::memcpy(at + i * sizeof(T), &value, sizeof(T));
}

// Operands may be identical or disjoint; a partial overlap is forbidden.
inline void check_overlap(const Core& core, const Place& dst, uint64_t dst_bytes, const Place& src, uint64_t src_bytes,
                          bool same_allowed) {
  if (same_allowed && dst.address == src.address) return;
  NGRAM_TWIN_CHECK(dst.address + dst_bytes <= src.address || src.address + src_bytes <= dst.address,
                   "block %d: %s: source and destination overlap", core.block(), core.what());
}

inline uint64_t checked_count(const Core& core, int64_t count) {
  NGRAM_TWIN_CHECK(count >= 1, "block %d: %s: a count of %lld", core.block(), core.what(),
                   static_cast<long long>(count));
  return static_cast<uint64_t>(count);
}

// dst[i] = f(a[i]); an element is poison if a's is, unless `poison` computes the result's poison bits from a's.
template <class D, class S, class F, class Poison = std::nullptr_t>
void unary(const char* what, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src, int64_t count, F f,
           Poison poison = nullptr) {
  Core& core = Core::current();
  core.issue(kV, what);
  const uint64_t n = checked_count(core, count);
  check_overlap(core, dst.place(), n * sizeof(D), src.place(), n * sizeof(S), sizeof(D) == sizeof(S));
  const uint8_t* a = core.read(src.place(), n * sizeof(S));
  uint8_t* d = core.write(dst.place(), n * sizeof(D));
  uint8_t* ds = core.shadow(d);
  if (any_poison(core.shadow(a), n * sizeof(S))) {
    for (uint64_t i = 0; i < n; ++i) {
      if constexpr (std::is_null_pointer_v<Poison>) {
        std::memset(ds + i * sizeof(D), any_poison(core.shadow(a) + i * sizeof(S), sizeof(S)) ? 0xFF : 0, sizeof(D));
      } else {
        store<D>(ds, i, poison(load<S>(core.shadow(a), i)));
      }
    }
  } else {
    std::memset(ds, 0, n * sizeof(D));
  }
  for (uint64_t i = 0; i < n; ++i) store<D>(d, i, f(load<S>(a, i)));
  core.vector_cost(n * std::max(sizeof(D), sizeof(S)));
}

struct Elementwise {  // a result's poison from both operands' values and poison: the whole element or none
  template <class T>
  static void shadow(uint8_t* d, const uint8_t*, const uint8_t* as, const uint8_t*, const uint8_t* bs, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      const bool poison = any_poison(as + i * sizeof(T), sizeof(T)) || any_poison(bs + i * sizeof(T), sizeof(T));
      std::memset(d + i * sizeof(T), poison ? 0xFF : 0, sizeof(T));
    }
  }
};
struct AndBits {  // a known 0 hides poison
  template <class T>
  static void shadow(uint8_t* d, const uint8_t* a, const uint8_t* as, const uint8_t* b, const uint8_t* bs, uint64_t n) {
    for (uint64_t i = 0; i < n * sizeof(T); ++i)
      d[i] = static_cast<uint8_t>((as[i] & bs[i]) | (as[i] & b[i]) | (bs[i] & a[i]));
  }
};
struct OrBits {
  template <class T>
  static void shadow(uint8_t* d, const uint8_t* a, const uint8_t* as, const uint8_t* b, const uint8_t* bs, uint64_t n) {
    for (uint64_t i = 0; i < n * sizeof(T); ++i)
      d[i] = static_cast<uint8_t>((as[i] & bs[i]) | (as[i] & ~b[i]) | (bs[i] & ~a[i]));
  }
};

template <class Poison = Elementwise, class T, class F>
void binary(const char* what, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
            const AscendC::LocalTensor<T>& src1, int64_t count, F f) {
  Core& core = Core::current();
  core.issue(kV, what);
  const uint64_t n = checked_count(core, count);
  const uint64_t bytes = n * sizeof(T);
  check_overlap(core, dst.place(), bytes, src0.place(), bytes, true);
  check_overlap(core, dst.place(), bytes, src1.place(), bytes, true);
  const uint8_t* a = core.read(src0.place(), bytes);
  const uint8_t* b = core.read(src1.place(), bytes);
  uint8_t* d = core.write(dst.place(), bytes);
  const uint8_t* as = core.shadow(a);
  const uint8_t* bs = core.shadow(b);
  if (any_poison(as, bytes) || any_poison(bs, bytes)) {
    Poison::template shadow<T>(core.shadow(d), a, as, b, bs, n);
  } else {
    std::memset(core.shadow(d), 0, bytes);
  }
  for (uint64_t i = 0; i < n; ++i) store<T>(d, i, f(load<T>(a, i), load<T>(b, i)));
  core.vector_cost(bytes);
}

// Integers wrap.
template <class T, class F>
auto wrapping(F f) {
  return [f](T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
    } else {
      return f(a, b);
    }
  };
}

inline constexpr auto plus = [](auto a, auto b) { return a + b; };
inline constexpr auto minus = [](auto a, auto b) { return a - b; };
inline constexpr auto times = [](auto a, auto b) { return a * b; };
inline constexpr auto lesser = [](auto a, auto b) { return b < a ? b : a; };
inline constexpr auto greater = [](auto a, auto b) { return a < b ? b : a; };

// A shift moves the poison along.
template <class T, class F>
void shifted(const char* what, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, T by,
             int64_t count, F f) {
  NGRAM_TWIN_CHECK(by >= 0 && static_cast<uint64_t>(by) <= sizeof(T) * 8, "block %d: %s by %lld bits",
                   Core::current().block(), what, static_cast<long long>(by));
  const auto shift = [&](T a) { return f(a, by); };
  unary(what, dst, src, count, shift, shift);
}

// dst[i] = f(i).
template <class T, class F>
void generate(Core& core, const char* what, const AscendC::LocalTensor<T>& dst, int64_t count, F f) {
  core.issue(kV, what);
  const uint64_t n = checked_count(core, count);
  uint8_t* d = core.write(dst.place(), n * sizeof(T));
  std::memset(core.shadow(d), 0, n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) store<T>(d, i, f(i));
}

}  // namespace ngram_npu::twin

namespace AscendC {

using ngram_npu::twin::Call;

#define NGRAM_TWIN_OFFERED(call, T) \
  static_assert(ngram_npu::twin::offers<T>(Call::call), "this chip does not offer the call on this element type")

#define NGRAM_TWIN_BINARY(name, op)                                                                                    \
  template <class T>                                                                                                   \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) { \
    NGRAM_TWIN_OFFERED(k##name, T);                                                                                    \
    ngram_npu::twin::binary(#name, dst, src0, src1, count, op);                                                        \
  }
NGRAM_TWIN_BINARY(Add, ngram_npu::twin::wrapping<T>(ngram_npu::twin::plus))
NGRAM_TWIN_BINARY(Sub, ngram_npu::twin::wrapping<T>(ngram_npu::twin::minus))
NGRAM_TWIN_BINARY(Mul, ngram_npu::twin::wrapping<T>(ngram_npu::twin::times))
NGRAM_TWIN_BINARY(Min, ngram_npu::twin::lesser)
#undef NGRAM_TWIN_BINARY

#define NGRAM_TWIN_SCALAR(name, op)                                                                             \
  template <class T>                                                                                            \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) { \
    NGRAM_TWIN_OFFERED(k##name, T);                                                                             \
    const auto f = op;                                                                                          \
    ngram_npu::twin::unary(#name, dst, src, count, [&](T a) { return f(a, scalarValue); });                     \
  }
NGRAM_TWIN_SCALAR(Adds, ngram_npu::twin::wrapping<T>(ngram_npu::twin::plus))
NGRAM_TWIN_SCALAR(Muls, ngram_npu::twin::wrapping<T>(ngram_npu::twin::times))
NGRAM_TWIN_SCALAR(Maxs, ngram_npu::twin::greater)
NGRAM_TWIN_SCALAR(Mins, ngram_npu::twin::lesser)
#undef NGRAM_TWIN_SCALAR

template <class T>
void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
  NGRAM_TWIN_OFFERED(kAnd, T);
  ngram_npu::twin::binary<ngram_npu::twin::AndBits>("And", dst, src0, src1, count,
                                                    [](T a, T b) { return static_cast<T>(a & b); });
}
template <class T>
void Or(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
  NGRAM_TWIN_OFFERED(kOr, T);
  ngram_npu::twin::binary<ngram_npu::twin::OrBits>("Or", dst, src0, src1, count,
                                                   [](T a, T b) { return static_cast<T>(a | b); });
}
template <class T>
void ShiftLeft(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_OFFERED(kShiftLeft, T);
  ngram_npu::twin::shifted("ShiftLeft", dst, src, scalarValue, count, [](T a, T by) {
    return static_cast<T>(static_cast<uint64_t>(a) << static_cast<uint64_t>(by));
  });
}
// Signed types keep their sign.
template <class T>
void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_OFFERED(kShiftRight, T);
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  ngram_npu::twin::shifted("ShiftRight", dst, src, scalarValue, count,
                           [](T a, T by) { return static_cast<T>(static_cast<Wide>(a) >> static_cast<Wide>(by)); });
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_OFFERED(kDuplicate, T);
  Core& core = Core::current();
  ngram_npu::twin::generate(core, "Duplicate", dst, count, [&](uint64_t) { return scalarValue; });
  core.vector_cost(static_cast<uint64_t>(count) * sizeof(T));
}

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
  generate(core, "CreateVecIndex", dst, count,
           [&](uint64_t i) { return static_cast<T>(static_cast<uint64_t>(firstValue) + i); });
  core.cost[kScalarUb] += kBlockBytes / sizeof(T);
  for (uint64_t done = 0; done < uint64_t{count} * sizeof(T); done += kRepeatBytes) core.vector_cost(kRepeatBytes);
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

// The scalar unit.
namespace AscendC {

// kernel_scalar.h:169-187.
template <class T, class U, RoundMode roundMode>
U ScalarCast(T valueIn) {
  static_assert(std::is_same_v<T, float> && std::is_same_v<U, int32_t>, "the twin has float to int32");
  static_assert(roundMode == RoundMode::CAST_RINT, "the scalar unit does not round this way");
  return ngram_npu::twin::converted<U>(valueIn);
}

// Position of the lowest bit equal to countValue; -1 if there is none.
template <int countValue>
int64_t ScalarGetSFFValue(uint64_t valueIn) {
  static_assert(countValue == 0 || countValue == 1, "a bit is 0 or 1");
  const uint64_t bits = countValue == 1 ? valueIn : ~valueIn;
  return bits == 0 ? -1 : __builtin_ctzll(bits);
}

inline int64_t ScalarCountLeadingZero(uint64_t valueIn) { return valueIn == 0 ? 64 : __builtin_clzll(valueIn); }

}  // namespace AscendC
