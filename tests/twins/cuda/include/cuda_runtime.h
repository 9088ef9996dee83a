// The part of CUDA that the kernels in csrc/cuda use, for an ordinary C++ compiler: found before the toolkit's header
// of this name. Device functions are plain functions; what threads do together goes to the model (twin/model.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "twin/model.h"

#define __host__
#define __device__
#define __global__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// One copy in a section of its own: the model knows where shared memory lies, and swaps it when it swaps blocks. In a
// template the compiler ignores the section, and all blocks would share one copy, so that does not compile. Declare a
// kernel template's shared memory in a function of its own.
#define __shared__                                                                                                 \
  static_assert(twin::keeps_shared_memory(__PRETTY_FUNCTION__), "__shared__ in a template is not kept per block"); \
  static __attribute__((section(NGRAM_TWIN_SHARED_SECTION)))

using cudaStream_t = struct CUstream_st*;

// clang-format off
#define NGRAM_TWIN_VECTORS(T, name, align2, align4)                      \
  struct alignas(align2) name##2 { T x, y; };                            \
  struct alignas(align4) name##4 { T x, y, z, w; };                      \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }             \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
// clang-format on
NGRAM_TWIN_VECTORS(int, int, 8, 16)
NGRAM_TWIN_VECTORS(unsigned, uint, 8, 16)
#undef NGRAM_TWIN_VECTORS

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

// The running thread's values; the model sets them when it switches threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#include "twin/device_functions.h"
#include "twin/host_functions.h"
