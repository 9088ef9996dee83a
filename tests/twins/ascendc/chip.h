// Tables of each chip's limits and of the element types that each call supports. Every row names its source in the open
// Ascend C code (paths below its impl/basic_api, CANN 9.1). A call with an element type that the chip does not support
// does not compile.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef NGRAM_TWIN_CHIP
#define NGRAM_TWIN_CHIP 2201
#endif
#define __NPU_ARCH__ NGRAM_TWIN_CHIP

// IEEE binary16, as stored on the device. Arithmetic converts to float, and results are rounded to nearest even.
namespace ngram_npu::twin {

inline float half_to_float(uint16_t half_bits) {
  const uint32_t sign = static_cast<uint32_t>(half_bits & 0x8000u) << 16;
  const uint32_t exponent = (half_bits >> 10) & 31u;
  const uint32_t mantissa = half_bits & 1023u;
  uint32_t bits = 0;
  if (exponent == 31) {
    bits = sign | 0x7F800000u | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {                                               // subnormal: adding 0.5 rounds
    float sum = 0;
    std::memcpy(&sum, &magnitude, sizeof(sum));
    sum += 0.5f;
    uint32_t sum_bits = 0;
    std::memcpy(&sum_bits, &sum, sizeof(sum_bits));
    return static_cast<uint16_t>(sign | (sum_bits - 0x3F000000u));
  }
  const uint32_t lowest_bit = magnitude >> 13 & 1u;
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + lowest_bit) >> 13);
}

}  // namespace ngram_npu::twin

struct half {
  uint16_t bits = 0;

  half() = default;
  half(float f) : bits(ngram_npu::twin::float_to_half(f)) {}               // NOLINT: implicit, as on the device
  operator float() const { return ngram_npu::twin::half_to_float(bits); }  // NOLINT
};
static_assert(sizeof(half) == 2);

namespace ngram_npu::twin {

struct Chip {
  int arch;
  const char* name;
  uint32_t ub_bytes;             // utils/kernel_utils_constants.h, TOTAL_UB_SIZE
  uint32_t ub_reserved_bytes;    // at the end of UB, for temporary data of the calls: TMP_UB_SIZE, and 256 bytes
  bool copies_with_pad_at_calc;  // whether DataCopyPad's document allows TPosition::VECCALC; only for the 950
};

constexpr Chip kChips[] = {
    {2201, "910B, A3", 192 * 1024, 8 * 1024 + 256, false},
    {3510, "950", 248 * 1024, 8 * 1024 + 256, true},
};

constexpr Chip find_chip(int arch) {
  for (const Chip& chip : kChips)
    if (chip.arch == arch) return chip;
  return {};
}
constexpr Chip kChip = find_chip(NGRAM_TWIN_CHIP);
static_assert(kChip.arch != 0, "NGRAM_TWIN_CHIP: expected an arch of kChips: 2201 or 3510");

// These limits are the same on all chips. kNumEventIds is QUE_MAX_EVENT (8, kernel_macros.h) minus the IDs 6 and 7,
// which the framework reserves. Limits without a comment are in kernel_utils_constants.h.
constexpr int kNumEventIds = 6;
constexpr int kMaxBuffers = 64;  // kernel_tpipe_impl.h:332
constexpr uint32_t kBlockBytes = 32;
constexpr uint32_t kRepeatBytes = 256;
constexpr uint32_t kMaxRepeats = 255;
constexpr uint32_t kMaxPadBlockBytes = 2 * 1024 * 1024 - 1;  // kernel_operator_data_copy_check.h:388
constexpr uint32_t kScalarLineBytes = 64;                    // CACHE_LINE_SIZE

enum Dtype : uint32_t {
  kI8 = 1,
  kU8 = 2,
  kI16 = 4,
  kU16 = 8,
  kI32 = 16,
  kU32 = 32,
  kI64 = 64,
  kU64 = 128,
  kHalf = 256,
  kFloat = 512,
};
constexpr uint32_t kNoType = 0;
constexpr uint32_t kFloatTypes = kHalf | kFloat;
constexpr uint32_t kArithmeticTypes = kFloatTypes | kI16 | kI32;
constexpr uint32_t k16BitTypes = kI16 | kU16;
constexpr uint32_t kShiftTypes = k16BitTypes | kI32 | kU32;
constexpr uint32_t kMoveTypes = kFloatTypes | kShiftTypes;
constexpr uint32_t kIntegerTypes = kI8 | kU8 | kShiftTypes | kI64 | kU64;

enum class Call {
  kAdd,
  kSub,
  kMul,
  kMin,
  kAnd,
  kOr,
  kAdds,
  kMuls,
  kMaxs,
  kMins,
  kShiftLeft,
  kShiftRight,
  kCompareScalar,
  kGather,
  kDuplicate,
  kCreateVecIndex,
  kSetAtomicMax,
};

struct DtypeRow {
  Call call;
  uint32_t on_2201;
  uint32_t on_3510;
  const char* reference;
};

#define C220 "dav_c220/kernel_operator_vec_"
#define C310 "dav_3510/kernel_operator_vec_"
constexpr DtypeRow kDtypes[] = {
    {Call::kAdd, kArithmeticTypes, kFloatTypes | kIntegerTypes,
     C220 "binary_impl.h:35, " C310 "binary_continuous_impl.h:78"},
    {Call::kSub, kArithmeticTypes, kFloatTypes | kIntegerTypes,
     C220 "binary_impl.h:95, " C310 "binary_continuous_impl.h:97"},
    {Call::kMul, kArithmeticTypes, kFloatTypes | kIntegerTypes,
     C220 "binary_impl.h:154, " C310 "binary_continuous_impl.h:119"},
    {Call::kMin, kArithmeticTypes, kFloatTypes | kIntegerTypes,
     C220 "binary_impl.h:331, " C310 "binary_continuous_impl.h:218"},
    // On the 2201, the form with a count processes int32 as int16, so it covers half of the data: not offered here.
    {Call::kAnd, k16BitTypes, kIntegerTypes, C220 "binary_impl.h:391, " C310 "binary_continuous_impl.h:240"},
    {Call::kOr, k16BitTypes, kIntegerTypes, C220 "binary_impl.h:458, " C310 "binary_continuous_impl.h:261"},
    {Call::kAdds, kArithmeticTypes, kArithmeticTypes | kI64 | kU64,
     C220 "binary_scalar_impl.h:35, " C310 "binary_scalar_impl.h:245"},
    {Call::kMuls, kArithmeticTypes, kArithmeticTypes | kI64 | kU64,
     C220 "binary_scalar_impl.h:96, " C310 "binary_scalar_impl.h:300"},
    {Call::kMaxs, kArithmeticTypes, kArithmeticTypes | kI8 | kU8 | kI64 | kU64,
     C220 "binary_scalar_impl.h:157, " C310 "binary_scalar_impl.h:342"},
    {Call::kMins, kArithmeticTypes, kArithmeticTypes | kI8 | kU8 | kI64 | kU64,
     C220 "binary_scalar_impl.h:217, " C310 "binary_scalar_impl.h:384"},
    {Call::kShiftLeft, kShiftTypes, kIntegerTypes, C220 "binary_scalar_impl.h:278, " C310 "binary_scalar_impl.h:426"},
    {Call::kShiftRight, kShiftTypes, kIntegerTypes, C220 "binary_scalar_impl.h:344, " C310 "binary_scalar_impl.h:469"},
    {Call::kCompareScalar, kFloatTypes | kI32, kFloatTypes | kIntegerTypes,
     C220 "cmp_impl.h:354-365, " C310 "cmp_impl.h"},
    {Call::kGather, kMoveTypes, kMoveTypes | kI8 | kU8,
     C220 "gather_impl.h:59, kernel_operator_vec_gather_intf_impl.h:185"},
    {Call::kDuplicate, kMoveTypes, kMoveTypes | kIntegerTypes, C220 "duplicate_impl.h:31, " C310 "duplicate_impl.h:28"},
    {Call::kCreateVecIndex, kArithmeticTypes, kArithmeticTypes | kI8 | kI64,
     C220 "createvecindex_impl.h:155, " C310 "createvecindex_impl.h:44"},
    {Call::kSetAtomicMax, kFloatTypes | kI8 | kI16 | kI32, kFloatTypes | kI8 | kI16 | kI32,
     "docs/api/context/SetAtomicMax(ISASI).md"},
};

// The conversions that the kernels need; both chips have these. int32 -> half is not offered, although the 2201 has it:
// the 2201 scales by a register that must be set first.
enum CastMode : uint32_t { kCastNone = 1, kCastRint = 2 };  // bit masks of RoundMode::CAST_NONE and CAST_RINT
struct CastRow {
  Dtype from;
  Dtype to;
  uint32_t modes_2201;
  uint32_t modes_3510;
  const char* reference;

  constexpr uint32_t modes(int arch) const { return arch == 2201 ? modes_2201 : modes_3510; }
};
// dav_3510 lists the first three conversions only in cast_round_all. There its library treats CAST_NONE as CAST_RINT.
constexpr CastRow kCasts[] = {
    {kI32, kFloat, kCastNone | kCastRint, kCastRint, C220 "vconv_impl.h:90-115, " C310 "vconv_impl.h:1370-1386"},
    {kFloat, kHalf, kCastNone | kCastRint, kCastRint, C220 "vconv_impl.h:303-333, " C310 "vconv_impl.h:1370-1386"},
    {kHalf, kU8, kCastNone | kCastRint, kCastRint, C220 "vconv_impl.h:255-280, " C310 "vconv_impl.h:1370-1386"},
    {kI64, kI32, kCastNone, kCastNone, C220 "vconv_impl.h:886, " C310 "vconv_impl.h:1384"},
};
#undef C220
#undef C310

template <class T>
constexpr uint32_t get_dtype() {
  if (std::is_same_v<T, half>) return kHalf;
  if (std::is_same_v<T, float>) return kFloat;
  if (!std::is_integral_v<T>) return kNoType;
  constexpr uint32_t is_unsigned = std::is_unsigned_v<T> ? 1 : 0;
  switch (sizeof(T)) {
    case 1: return kI8 << is_unsigned;
    case 2: return kI16 << is_unsigned;
    case 4: return kI32 << is_unsigned;
    default: return kI64 << is_unsigned;
  }
}

template <class T>
constexpr bool is_offered(Call call) {
  for (const DtypeRow& row : kDtypes) {
    if (row.call != call) continue;
    const uint32_t types = kChip.arch == 2201 ? row.on_2201 : row.on_3510;
    return (types & get_dtype<T>()) != 0;
  }
  return false;
}

constexpr const CastRow* find_cast_row(uint32_t from, uint32_t to) {
  for (const CastRow& row : kCasts)
    if (row.from == from && row.to == to) return &row;
  return nullptr;
}

}  // namespace ngram_npu::twin
