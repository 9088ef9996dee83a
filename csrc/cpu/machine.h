// Chooses the instruction set and the number of threads of the CPU kernels.
#pragma once

#include <sched.h>

#include <atomic>

#include "core/lookup_rules.h"

namespace ngram_npu::cpu {

// The scan of a row. Finds the match that docs/ops/ngram_propose.md defines in a row of num_tokens >= 2 tokens.
using FindMatch = Match (*)(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n,
                            int32_t match_policy);

Match find_match_scalar(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#if defined(__x86_64__)
Match find_match_avx2(const int32_t*, int64_t, int64_t, int64_t, int32_t);
Match find_match_avx512(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#elif defined(__aarch64__)
Match find_match_neon(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#endif

// Returns the scan for the instruction set in use: the widest of the machine, unless a caller or the environment
// variable NGRAM_NPU_INSTRUCTION_SET selects a narrower one, as the tests do.
FindMatch get_find_match();

// Returns the number of threads for a batch in which `tokens` tokens are read.
int32_t choose_num_threads(const Executor* executor, int64_t batch, int64_t tokens);

// Returns the number of tokens that a scan of these rows reads. Rows with an invalid length are not read.
template <class Token>
int64_t count_tokens_to_read(const TokenRows<Token>& rows, const int32_t* num_tokens, const IndexArray& row_indices,
                             int64_t batch) {
  int64_t sum = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t row = row_indices[i];
    if (rows.has(row) && num_tokens[row] > 0 && num_tokens[row] <= rows.capacity) sum += num_tokens[row];
  }
  return sum;
}

// Calls fn(i) for every i in [0, batch). Rows differ in length, so each thread takes the next row when it is free.
// `tokens` is the total number of tokens that are read.
template <class Fn>
void for_each_row(const Executor* executor, int64_t batch, int64_t tokens, const Fn& fn) {
  const int32_t num_threads = choose_num_threads(executor, batch, tokens);
  if (num_threads <= 1) {
    for (int64_t i = 0; i < batch; ++i) fn(i);
    return;
  }
  struct SharedState {
    const Fn& fn;
    int64_t batch;
    std::atomic<int64_t> next_row;
  } shared_state{fn, batch, {0}};
  executor->run(
      executor, num_threads,
      [](void* context, int32_t) {
        auto& state = *static_cast<SharedState*>(context);
        for (int64_t i; (i = state.next_row.fetch_add(1, std::memory_order_relaxed)) < state.batch;) state.fn(i);
      },
      &shared_state);
}

// Returns the number of cores that this process may use, or 1 if the system does not report it. get_affinity is
// sched_getaffinity, except in tests.
using GetAffinity = int (*)(pid_t pid, size_t bytes, cpu_set_t* cores);
int32_t count_available_cores(GetAffinity get_affinity = sched_getaffinity);

// Returns an executor that uses a small thread pool of this process, for callers without torch (thread_pool.cpp). The
// first call starts the pool's threads, which sleep between calls. If another call is using the pool, a call runs on
// its own thread instead of waiting. A forked process starts its own pool.
Executor pool_executor();

}  // namespace ngram_npu::cpu

// Name of the instruction set in use: "scalar", "avx2", "avx512", "neon".
NGRAM_NPU_EXPORT const char* ngram_npu_cpu_instruction_set();
// Selects the instruction set with one of these names; "auto" selects the widest. Returns kInvalidParams and changes
// nothing if the machine does not support it.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_set_instruction_set(const char* name);
// Limits every call to `limit` threads, in addition to the executor's limit; 0: no limit.
NGRAM_NPU_EXPORT void ngram_npu_cpu_set_num_threads(int32_t limit);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_num_threads();
