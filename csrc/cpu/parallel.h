// Distributes rows to threads if there is enough work.
#pragma once

#include <atomic>

#include "core/common.h"

// Limits every call to `limit` threads, in addition to the executor's own limit; 0: no limit.
NGRAM_NPU_EXPORT void ngram_npu_cpu_set_num_threads(int32_t limit);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_num_threads();

namespace ngram_npu::cpu {

int32_t threads_for(const Executor* executor, int64_t batch, int64_t tokens);

// The number of tokens that a pass over these rows reads; invalid lengths count 0, because such rows are not read.
template <class Token>
int64_t tokens_to_read(const TokenRows<Token>& rows, const int32_t* num_tokens, const IndexArray& row_indices,
                       int64_t batch) {
  int64_t sum = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t row = row_indices[i];
    if (rows.has(row) && num_tokens[row] > 0 && num_tokens[row] <= rows.capacity) sum += num_tokens[row];
  }
  return sum;
}

// Calls fn(i) for every i in [0, batch). Rows differ in length, so a thread takes the next row when it is free.
template <class Fn>
void for_each_row(const Executor* executor, int64_t batch, int64_t tokens, const Fn& fn) {
  const int32_t threads = threads_for(executor, batch, tokens);
  if (threads <= 1) {
    for (int64_t i = 0; i < batch; ++i) fn(i);
    return;
  }
  struct Shared {
    const Fn& fn;
    int64_t batch;
    std::atomic<int64_t> next;
  } shared{fn, batch, {0}};
  executor->run(
      executor, threads,
      [](void* context, int32_t) {
        auto& s = *static_cast<Shared*>(context);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.batch;) s.fn(i);
      },
      &shared);
}

}  // namespace ngram_npu::cpu
