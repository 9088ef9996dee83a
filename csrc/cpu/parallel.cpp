// The limit of threads, for every kernel that uses some.
#include "cpu/parallel.h"

namespace {
std::atomic<int32_t> thread_limit{0};
}

void ngram_npu_cpu_set_num_threads(int32_t limit) { thread_limit.store(limit < 0 ? 0 : limit); }
int32_t ngram_npu_cpu_num_threads() { return thread_limit.load(); }

namespace ngram_npu::cpu {

int32_t threads_for(const Executor* executor, int64_t batch, int64_t tokens) {
  if (executor == nullptr) return 1;
  int64_t threads = executor->max_threads;
  if (const int32_t limit = ngram_npu_cpu_num_threads(); limit > 0) threads = smaller<int64_t>(threads, limit);
  return static_cast<int32_t>(smaller(smaller(threads, batch), tokens / executor->min_tokens_per_thread));
}

}  // namespace ngram_npu::cpu
