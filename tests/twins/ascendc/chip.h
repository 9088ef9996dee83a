// Tables of each chip's limits and of the integer types that each call supports; the kernels use no other types. Every
// row names its source in the open Ascend C code (paths below its impl/basic_api, CANN 9.1). A call with an element
// type that the chip does not support does not compile.
#pragma once

#include <cstdint>
#include <type_traits>

#ifndef NGRAM_TWIN_CHIP
#define NGRAM_TWIN_CHIP 2201
#endif
#define __NPU_ARCH__ NGRAM_TWIN_CHIP

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
};
constexpr uint32_t kNoType = 0;
constexpr uint32_t kArithmeticTypes = kI16 | kI32;
constexpr uint32_t k16BitTypes = kI16 | kU16;
constexpr uint32_t kShiftTypes = k16BitTypes | kI32 | kU32;
constexpr uint32_t kAllTypes = kI8 | kU8 | kShiftTypes | kI64 | kU64;

enum class Call {
  kSub,
  kMin,
  kAnd,
  kOr,
  kMuls,
  kMaxs,
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
    {Call::kSub, kArithmeticTypes, kAllTypes, C220 "binary_impl.h:95, " C310 "binary_continuous_impl.h:97"},
    {Call::kMin, kArithmeticTypes, kAllTypes, C220 "binary_impl.h:331, " C310 "binary_continuous_impl.h:218"},
    // On the 2201, the form with a count processes int32 as int16, so it covers half of the data: not offered here.
    {Call::kAnd, k16BitTypes, kAllTypes, C220 "binary_impl.h:391, " C310 "binary_continuous_impl.h:240"},
    {Call::kOr, k16BitTypes, kAllTypes, C220 "binary_impl.h:458, " C310 "binary_continuous_impl.h:261"},
    {Call::kMuls, kArithmeticTypes, kArithmeticTypes | kI64 | kU64,
     C220 "binary_scalar_impl.h:96, " C310 "binary_scalar_impl.h:300"},
    {Call::kMaxs, kArithmeticTypes, kArithmeticTypes | kI8 | kU8 | kI64 | kU64,
     C220 "binary_scalar_impl.h:157, " C310 "binary_scalar_impl.h:342"},
    {Call::kShiftLeft, kShiftTypes, kAllTypes, C220 "binary_scalar_impl.h:278, " C310 "binary_scalar_impl.h:426"},
    {Call::kShiftRight, kShiftTypes, kAllTypes, C220 "binary_scalar_impl.h:344, " C310 "binary_scalar_impl.h:469"},
    {Call::kCompareScalar, kI32, kAllTypes, C220 "cmp_impl.h:354-365, " C310 "cmp_impl.h"},
    {Call::kGather, kShiftTypes, kShiftTypes | kI8 | kU8,
     C220 "gather_impl.h:59, kernel_operator_vec_gather_intf_impl.h:185"},
    {Call::kDuplicate, kShiftTypes, kAllTypes, C220 "duplicate_impl.h:31, " C310 "duplicate_impl.h:28"},
    {Call::kCreateVecIndex, kArithmeticTypes, kArithmeticTypes | kI8 | kI64,
     C220 "createvecindex_impl.h:155, " C310 "createvecindex_impl.h:44"},
    {Call::kSetAtomicMax, kI8 | kI16 | kI32, kI8 | kI16 | kI32, "docs/api/context/SetAtomicMax(ISASI).md"},
};
#undef C220
#undef C310

template <class T>
constexpr uint32_t get_dtype() {
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

}  // namespace ngram_npu::twin
