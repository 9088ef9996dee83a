// The host twin's replacement of the device library's header of the same name. It contains the part of Ascend C that
// the kernels use, with the signatures of the open headers, and checks every call. docs/design/kernels.md states
// what the twin can and cannot check.
#pragma once

#include "pipe.h"

#define __global__
#define __aicore__
#define __gm__

struct Part;  // the compiler for the 950 declares a type that its headers need

constexpr int KERNEL_TYPE_AIV_ONLY = 0;
#define KERNEL_TASK_TYPE_DEFAULT(value) static_assert(value == KERNEL_TYPE_AIV_ONLY, "the twin has vector cores only")

// The vector unit: computes one element after the other and propagates poison.
namespace ngram_npu::twin {

inline bool has_poison(const uint8_t* shadow, uint64_t bytes) {
  uint64_t poison = 0;
  uint64_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, shadow + i, 8);
    poison |= word;
  }
  for (; i < bytes; ++i) poison |= shadow[i];
  return poison != 0;
}

template <class T>
T load(const uint8_t* memory, uint64_t i) {
  T value;
  std::memcpy(&value, memory + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(uint8_t* memory, uint64_t i, T value) {
  std::memcpy(memory + i * sizeof(T), &value, sizeof(T));
}

// Operands may be identical or disjoint; a partial overlap is forbidden.
inline void check_overlap(const Core& core, const TensorLocation& dst, uint64_t dst_bytes, const TensorLocation& src,
                          uint64_t src_bytes, bool allows_identical) {
  if (allows_identical && dst.address == src.address) return;
  NGRAM_TWIN_CHECK(dst.address + dst_bytes <= src.address || src.address + src_bytes <= dst.address,
                   "block %d: %s: source and destination overlap", core.block(), core.call_name());
}

inline uint64_t check_count(const Core& core, int64_t count) {
  NGRAM_TWIN_CHECK(count >= 1, "block %d: %s: a count of %lld", core.block(), core.call_name(),
                   static_cast<long long>(count));
  return static_cast<uint64_t>(count);
}

// Computes dst[i] = f(src[i]). An element of dst is poison if the element of src has poison. If `get_poison` is given,
// it computes the poison bits of the dst element from those of the src element instead.
template <class D, class S, class F, class Poison = std::nullptr_t>
void apply_unary(const char* call_name, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src,
                 int64_t count, F f, Poison get_poison = nullptr) {
  Core& core = Core::current();
  core.issue(kV, call_name);
  const uint64_t n = check_count(core, count);
  check_overlap(core, dst.location(), n * sizeof(D), src.location(), n * sizeof(S), sizeof(D) == sizeof(S));
  const uint8_t* src_memory = core.read(src.location(), n * sizeof(S));
  const uint8_t* src_shadow = core.shadow(src_memory);
  uint8_t* dst_memory = core.write(dst.location(), n * sizeof(D));
  uint8_t* dst_shadow = core.shadow(dst_memory);
  if (has_poison(src_shadow, n * sizeof(S))) {
    for (uint64_t i = 0; i < n; ++i) {
      if constexpr (std::is_null_pointer_v<Poison>) {
        std::memset(dst_shadow + i * sizeof(D), has_poison(src_shadow + i * sizeof(S), sizeof(S)) ? 0xFF : 0,
                    sizeof(D));
      } else {
        store<D>(dst_shadow, i, get_poison(load<S>(src_shadow, i)));
      }
    }
  } else {
    std::memset(dst_shadow, 0, n * sizeof(D));
  }
  for (uint64_t i = 0; i < n; ++i) store<D>(dst_memory, i, f(load<S>(src_memory, i)));
  core.add_vector_cost(n * std::max(sizeof(D), sizeof(S)));
}

// The following structs compute the shadow of a apply_binary operation's n results from the values a, b of the operands
// and from the operands' shadows. ElementPoison: a result is poison if an operand's element has poison.
struct ElementPoison {
  template <class T>
  static void propagate(uint8_t* dst_shadow, const uint8_t*, const uint8_t* a_shadow, const uint8_t*,
                        const uint8_t* b_shadow, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t offset = i * sizeof(T);
      const bool poison = has_poison(a_shadow + offset, sizeof(T)) || has_poison(b_shadow + offset, sizeof(T));
      std::memset(dst_shadow + offset, poison ? 0xFF : 0, sizeof(T));
    }
  }
};
struct AndPoison {  // the result is a known 0 if one operand's bit is a known 0
  template <class T>
  static void propagate(uint8_t* dst_shadow, const uint8_t* a, const uint8_t* a_shadow, const uint8_t* b,
                        const uint8_t* b_shadow, uint64_t n) {
    for (uint64_t i = 0; i < n * sizeof(T); ++i)
      dst_shadow[i] = static_cast<uint8_t>((a_shadow[i] & b_shadow[i]) | (a_shadow[i] & b[i]) | (b_shadow[i] & a[i]));
  }
};
struct OrPoison {  // the result is a known 1 if one operand's bit is a known 1
  template <class T>
  static void propagate(uint8_t* dst_shadow, const uint8_t* a, const uint8_t* a_shadow, const uint8_t* b,
                        const uint8_t* b_shadow, uint64_t n) {
    for (uint64_t i = 0; i < n * sizeof(T); ++i)
      dst_shadow[i] = static_cast<uint8_t>((a_shadow[i] & b_shadow[i]) | (a_shadow[i] & ~b[i]) | (b_shadow[i] & ~a[i]));
  }
};

// Computes dst[i] = f(src0[i], src1[i]).
template <class Poison = ElementPoison, class T, class F>
void apply_binary(const char* call_name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                  const AscendC::LocalTensor<T>& src1, int64_t count, F f) {
  Core& core = Core::current();
  core.issue(kV, call_name);
  const uint64_t n = check_count(core, count);
  const uint64_t bytes = n * sizeof(T);
  check_overlap(core, dst.location(), bytes, src0.location(), bytes, true);
  check_overlap(core, dst.location(), bytes, src1.location(), bytes, true);
  const uint8_t* a = core.read(src0.location(), bytes);
  const uint8_t* b = core.read(src1.location(), bytes);
  uint8_t* dst_memory = core.write(dst.location(), bytes);
  const uint8_t* a_shadow = core.shadow(a);
  const uint8_t* b_shadow = core.shadow(b);
  if (has_poison(a_shadow, bytes) || has_poison(b_shadow, bytes)) {
    Poison::template propagate<T>(core.shadow(dst_memory), a, a_shadow, b, b_shadow, n);
  } else {
    std::memset(core.shadow(dst_memory), 0, bytes);
  }
  for (uint64_t i = 0; i < n; ++i) store<T>(dst_memory, i, f(load<T>(a, i), load<T>(b, i)));
  core.add_vector_cost(bytes);
}

// Returns f with arithmetic that wraps.
template <class T, class F>
auto make_wrapping(F f) {
  return [f](T a, T b) { return static_cast<T>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b))); };
}

inline constexpr auto minus = [](auto a, auto b) { return a - b; };
inline constexpr auto times = [](auto a, auto b) { return a * b; };
inline constexpr auto minimum = [](auto a, auto b) { return b < a ? b : a; };
inline constexpr auto maximum = [](auto a, auto b) { return a < b ? b : a; };

// Shifts each element by num_bits. The poison bits are apply_shift like the values.
template <class T, class F>
void apply_shift(const char* call_name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                 T num_bits, int64_t count, F f) {
  NGRAM_TWIN_CHECK(num_bits >= 0 && static_cast<uint64_t>(num_bits) <= sizeof(T) * 8, "block %d: %s by %lld bits",
                   Core::current().block(), call_name, static_cast<long long>(num_bits));
  const auto shift = [&](T value) { return f(value, num_bits); };
  apply_unary(call_name, dst, src, count, shift, shift);
}

// Writes dst[i] = f(i).
template <class T, class F>
void generate_elements(Core& core, const char* call_name, const AscendC::LocalTensor<T>& dst, int64_t count, F f) {
  core.issue(kV, call_name);
  const uint64_t n = check_count(core, count);
  uint8_t* dst_memory = core.write(dst.location(), n * sizeof(T));
  std::memset(core.shadow(dst_memory), 0, n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) store<T>(dst_memory, i, f(i));
}

}  // namespace ngram_npu::twin

namespace AscendC {

using ngram_npu::twin::Call;

// A static assertion that the chip offers the call on the element type.
#define NGRAM_TWIN_REQUIRE_OFFERED(call, T) \
  static_assert(ngram_npu::twin::is_offered<T>(Call::call), "this chip does not offer the call on this element type")

#define NGRAM_TWIN_BINARY(name, op)                                                                                    \
  template <class T>                                                                                                   \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) { \
    NGRAM_TWIN_REQUIRE_OFFERED(k##name, T);                                                                            \
    ngram_npu::twin::apply_binary(#name, dst, src0, src1, count, op);                                                  \
  }
NGRAM_TWIN_BINARY(Sub, ngram_npu::twin::make_wrapping<T>(ngram_npu::twin::minus))
NGRAM_TWIN_BINARY(Min, ngram_npu::twin::minimum)
#undef NGRAM_TWIN_BINARY

#define NGRAM_TWIN_SCALAR(name, op)                                                                             \
  template <class T>                                                                                            \
  void name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) { \
    NGRAM_TWIN_REQUIRE_OFFERED(k##name, T);                                                                     \
    const auto f = op;                                                                                          \
    ngram_npu::twin::apply_unary(#name, dst, src, count, [&](T a) { return f(a, scalarValue); });               \
  }
NGRAM_TWIN_SCALAR(Muls, ngram_npu::twin::make_wrapping<T>(ngram_npu::twin::times))
NGRAM_TWIN_SCALAR(Maxs, ngram_npu::twin::maximum)
#undef NGRAM_TWIN_SCALAR

template <class T>
void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kAnd, T);
  ngram_npu::twin::apply_binary<ngram_npu::twin::AndPoison>("And", dst, src0, src1, count,
                                                            [](T a, T b) { return static_cast<T>(a & b); });
}
template <class T>
void Or(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kOr, T);
  ngram_npu::twin::apply_binary<ngram_npu::twin::OrPoison>("Or", dst, src0, src1, count,
                                                           [](T a, T b) { return static_cast<T>(a | b); });
}
template <class T>
void ShiftLeft(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kShiftLeft, T);
  ngram_npu::twin::apply_shift("ShiftLeft", dst, src, scalarValue, count, [](T value, T num_bits) {
    return static_cast<T>(static_cast<uint64_t>(value) << static_cast<uint64_t>(num_bits));
  });
}
// Values of signed types keep their sign.
template <class T>
void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kShiftRight, T);
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  ngram_npu::twin::apply_shift("ShiftRight", dst, src, scalarValue, count, [](T value, T num_bits) {
    return static_cast<T>(static_cast<Wide>(value) >> static_cast<Wide>(num_bits));
  });
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kDuplicate, T);
  Core& core = Core::current();
  ngram_npu::twin::generate_elements(core, "Duplicate", dst, count, [&](uint64_t) { return scalarValue; });
  core.add_vector_cost(static_cast<uint64_t>(count) * sizeof(T));
}

// Only EQ, because the 910B compares int32 as with EQ whatever the mode is.
enum class CMPMODE : uint8_t { EQ = 2 };

// Writes one bit per element; the first element has the lowest bit of the first byte.
template <class T, class U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE, uint32_t count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kCompareScalar, T);
  static_assert(std::is_same_v<U, uint8_t>, "the result bits are in a tensor of uint8_t");
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "CompareScalar");
  const uint64_t bytes = uint64_t{count} * sizeof(T);
  NGRAM_TWIN_CHECK(
      count >= 1 && bytes % kRepeatBytes == 0,
      "block %d: CompareScalar of %u elements: expected a multiple of 256 bytes, because the chip skips the rest",
      core.block(), count);
  check_overlap(core, dst.location(), count / 8, src0.location(), bytes, false);
  const uint8_t* src_memory = core.read(src0.location(), bytes);
  const uint8_t* src_shadow = core.shadow(src_memory);
  const bool is_poisoned = has_poison(src_shadow, bytes);
  uint8_t* dst_memory = core.write(dst.location(), count / 8);
  std::memset(dst_memory, 0, count / 8);
  std::memset(core.shadow(dst_memory), 0, count / 8);
  for (uint32_t i = 0; i < count; ++i) {
    const auto bit = static_cast<uint8_t>(1 << i % 8);
    if (load<T>(src_memory, i) == src1Scalar) dst_memory[i / 8] |= bit;
    if (is_poisoned && has_poison(src_shadow + i * sizeof(T), sizeof(T))) core.shadow(dst_memory)[i / 8] |= bit;
  }
  core.add_vector_cost(bytes);
}

template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const uint32_t srcBaseOffset, const uint32_t count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kGather, T);
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  core.issue(kV, "Gather");
  const uint64_t n = check_count(core, count);
  constexpr uint64_t items_per_repeat = kRepeatBytes / sizeof(T);
  NGRAM_TWIN_CHECK(n / items_per_repeat <= kMaxRepeats, "block %d: Gather of %u elements is more than %u repeats",
                   core.block(), count, kMaxRepeats);
  const uint64_t src_bytes = src.GetSize() * sizeof(T);
  check_overlap(core, dst.location(), n * sizeof(T), src.location(), src_bytes, false);
  check_overlap(core, dst.location(), n * sizeof(T), srcOffset.location(), n * sizeof(uint32_t), false);
  const uint8_t* offsets = core.read(srcOffset.location(), n * sizeof(uint32_t));
  if (has_poison(core.shadow(offsets), n * sizeof(uint32_t))) core.fail_on_poison();
  const uint8_t* src_memory = core.read(src.location(), src_bytes);
  uint8_t* dst_memory = core.write(dst.location(), n * sizeof(T));
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t offset = uint64_t{load<uint32_t>(offsets, i)} + srcBaseOffset;
    NGRAM_TWIN_CHECK(offset % sizeof(T) == 0 && offset + sizeof(T) <= src_bytes,
                     "block %d: Gather: byte offset %llu into %llu bytes", core.block(),
                     static_cast<unsigned long long>(offset), static_cast<unsigned long long>(src_bytes));
    std::memcpy(dst_memory + i * sizeof(T), src_memory + offset, sizeof(T));
    std::memcpy(core.shadow(dst_memory) + i * sizeof(T), core.shadow(src_memory) + offset, sizeof(T));
  }
  core.add_vector_cost(n * sizeof(T), Speed::kGather);
}

// The device writes the first 32 bytes with scalar instructions, then each 32 bytes up to the first 256 bytes, and each
// further 256 bytes, with a vector instruction that needs the result of the previous one.
template <class T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count) {
  NGRAM_TWIN_REQUIRE_OFFERED(kCreateVecIndex, T);
  using namespace ngram_npu::twin;
  Core& core = Core::current();
  generate_elements(core, "CreateVecIndex", dst, count,
                    [&](uint64_t i) { return static_cast<T>(static_cast<uint64_t>(firstValue) + i); });
  core.cost[kScalarUb] += kBlockBytes / sizeof(T);
  const uint64_t bytes = uint64_t{count} * sizeof(T);
  for (uint64_t done = kBlockBytes; done < bytes; done += done < kRepeatBytes ? kBlockBytes : kRepeatBytes)
    core.add_vector_cost(kRepeatBytes);
}

// The scalar unit.

// Returns the position of the lowest bit that is 1; -1 if there is none.
template <int countValue>
int64_t ScalarGetSFFValue(uint64_t valueIn) {
  static_assert(countValue == 1, "the twin searches for ones only");
  return valueIn == 0 ? -1 : __builtin_ctzll(valueIn);
}

inline int64_t ScalarCountLeadingZero(uint64_t valueIn) { return valueIn == 0 ? 64 : __builtin_clzll(valueIn); }

}  // namespace AscendC
