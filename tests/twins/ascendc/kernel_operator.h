// The host twin's counterpart of the device library's header of this name: the part of Ascend C that the kernels use,
// with the open headers' signatures, and strict. docs/design/ascendc-twin.md says what it can and cannot check.
#pragma once

#include "pipe.h"
#include "tensor.h"
#include "vector.h"

#define __global__
#define __aicore__
#define __gm__

struct Part;  // the 950's headers need one from its compiler

constexpr int KERNEL_TYPE_AIV_ONLY = 0;
#define KERNEL_TASK_TYPE_DEFAULT(value) static_assert(value == KERNEL_TYPE_AIV_ONLY, "the twin has vector cores only")

// What the scalar unit does besides arithmetic.
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
