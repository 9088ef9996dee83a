// Definitions that all operators and kernels share. The files in core/ use neither torch nor other libraries, so that
// g++, nvcc and the AscendC compiler can compile the same functions.
#pragma once

#include <cstdint>

#if defined(__CCE_AICORE__)
#include "kernel_operator.h"  // defines __aicore__ and __gm__
#endif

#if defined(__CUDACC__)
#define NGRAM_FN __host__ __device__ inline
#elif defined(__CCE_AICORE__)
#define NGRAM_FN __aicore__ inline
#else
// These functions are always inlined, because several files are compiled for different instruction sets, and the linker
// must not merge their functions.
#define NGRAM_FN inline __attribute__((always_inline))
#endif

// A backend library exports its C entry points and nothing else.
#define NGRAM_NPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace ngram_npu {

constexpr int64_t kMaxNgram = 64;         // upper limit of max_n
constexpr int64_t kMaxDraftTokens = 64;   // upper limit of k
constexpr int64_t kMaxSampledWidth = 65;  // upper limit of M, the width of sampled_token_ids
constexpr int32_t kNoToken = -1;          // value of output positions without a token

// A pointer into a tensor. On an NPU, tensors are in a separate address space; on other devices, this is a plain
// pointer. Params structs have the same memory layout on the host and on every device.
#if defined(__CCE_AICORE__)
template <class T>
using Gm = __gm__ T*;
#elif defined(NGRAM_NPU_GM_POINTER)  // a host twin, which checks every access
template <class T>
using Gm = NGRAM_NPU_GM_POINTER<T>;
#else
template <class T>
using Gm = T*;
#endif

enum MatchPolicy : int32_t { kEarliest = 0, kLatest = 1 };

// Return value of a C entry point. Invalid values inside tensors are not errors: the contracts define the results.
enum Status : int32_t { kOk = 0, kInvalidParams = 1, kLaunchFailed = 2, kOutOfMemory = 3 };

// The threads of a call. The caller provides the threads, so that two pools never compete for the cores: torch passes
// its own pool, and `_C` passes its small pool.
struct Executor {
  // Calls fn(context, task) for every task in [0, num_tasks), possibly in parallel; returns when all tasks are done.
  void (*run)(const Executor* self, int32_t num_tasks, void (*fn)(void* context, int32_t task), void* context);
  int32_t max_threads;
  int64_t min_tokens_per_thread;  // with fewer tokens per thread, fewer threads are faster; depends on the pool
  void* pool;
};

// A tensor of int32 or int64 indices. If the tensor is absent, item i is i.
struct IndexArray {
  Gm<const void> data;
  int32_t bytes;  // bytes per index: 4 or 8; 0 if the tensor is absent

  NGRAM_FN int64_t operator[](int64_t i) const {
    if (bytes == 0) return i;
    return bytes == 8 ? static_cast<Gm<const int64_t>>(data)[i] : static_cast<Gm<const int32_t>>(data)[i];
  }
};

// Rows of token ids. Each row has `capacity` contiguous ids, and consecutive rows begin `stride` ids apart. In a slice
// of a larger buffer, `stride` is larger than `capacity`.
template <class Token>
struct TokenRows {
  Gm<Token> data;
  int64_t rows;
  int64_t capacity;
  int64_t stride;

  NGRAM_FN bool has(int64_t row) const { return row >= 0 && row < rows; }
  NGRAM_FN Gm<Token> operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
NGRAM_FN constexpr T smaller(T a, T b) {
  return a < b ? a : b;
}

template <class T>
NGRAM_FN constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

NGRAM_FN bool is_valid_token(int32_t token, int64_t vocab_size) { return token >= 0 && token < vocab_size; }

// Two's complement addition and subtraction, which wrap on overflow.
NGRAM_FN int32_t wrap_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
NGRAM_FN int32_t wrap_sub(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// In the flat batch, request i's tokens are [query_start_loc[i], query_start_loc[i + 1]).

struct TokenRange {
  int64_t begin;
  int64_t end;
};

// The range of a request's tokens that lie in a tensor of `size` items; begin >= end if no token lies in it. `Offsets`
// is query_start_loc, or the part of it that a kernel has loaded.
template <class Offsets>
NGRAM_FN TokenRange request_token_range(const Offsets& query_start_loc, int64_t i, int64_t size) {
  return {larger<int64_t>(query_start_loc[i], 0), smaller<int64_t>(query_start_loc[i + 1], size)};
}

// The number of a request's tokens, including tokens beyond the tensors' sizes.
template <class Offsets>
NGRAM_FN int32_t num_scheduled_tokens(const Offsets& query_start_loc, int64_t i) {
  return wrap_sub(query_start_loc[i + 1], query_start_loc[i]);
}

}  // namespace ngram_npu
