// The thread pool of the numpy functions (`ngram_npu._C`).
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/machine.h"

namespace ngram_npu::cpu {
namespace {

// Returns the number of threads that torch would use: OMP_NUM_THREADS or, if it is not set, the number of cores that
// this process may use.
int32_t default_num_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    if (const long n = std::strtol(text, nullptr, 10); n > 0) return static_cast<int32_t>(smaller(n, 1024L));
  }
  return count_available_cores();
}

// Threads that run the tasks of one call at a time. The calling thread runs task 0, thread `id` runs task `id`.
class Pool {
 public:
  using Task = void (*)(void*, int32_t);

  void run(int32_t num_tasks, Task fn, void* context) {
    const std::unique_lock<std::mutex> call_lock(call_mutex_, std::try_to_lock);
    if (num_tasks < 2 || !call_lock.owns_lock() || !start_threads(num_tasks - 1)) {
      for (int32_t task = 0; task < num_tasks; ++task) fn(context, task);
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fn_ = fn;
      context_ = context;
      num_helpers_ = num_tasks - 1;
      num_pending_ = num_tasks - 1;
      ++round_;
    }
    start_condition_.notify_all();
    fn(context, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_condition_.wait(lock, [this] { return num_pending_ == 0; });
  }

 private:
  // Starts threads until there are num_helpers threads. Returns false if the system cannot start a thread.
  bool start_threads(int32_t num_helpers) {
    try {
      while (static_cast<int32_t>(threads_.size()) < num_helpers) {
        const auto id = static_cast<int32_t>(threads_.size()) + 1;
        threads_.emplace_back([this, id, last_round = round_] { run_worker(id, last_round); });
      }
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  void run_worker(int32_t id, uint64_t last_round) {
    for (;;) {
      Task fn = nullptr;
      void* context = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_condition_.wait(lock, [&] { return round_ != last_round; });
        last_round = round_;
        if (id > num_helpers_) continue;
        fn = fn_;
        context = context_;
      }
      fn(context, id);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--num_pending_ == 0) done_condition_.notify_one();
    }
  }

  std::mutex call_mutex_;  // locked by the call that uses the pool
  std::mutex mutex_;       // guards all members below
  std::condition_variable start_condition_;
  std::condition_variable done_condition_;
  std::vector<std::thread> threads_;
  Task fn_ = nullptr;
  void* context_ = nullptr;
  int32_t num_helpers_ = 0;
  int32_t num_pending_ = 0;
  uint64_t round_ = 0;  // number of calls that have used the threads
};

// The process's pool. It is never destroyed, because its threads may use it until the process ends. A forked child does
// not have these threads, so it creates its own pool. The pointer is atomic instead of protected by a lock, because a
// child could never lock a mutex that another thread had locked during the fork.
std::atomic<Pool*> process_pool{nullptr};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { process_pool.store(nullptr); });

Pool& get_pool() {
  Pool* existing = process_pool.load();
  if (existing != nullptr) return *existing;
  Pool* created = new Pool;
  if (process_pool.compare_exchange_strong(existing, created)) return *created;
  delete created;  // another thread has created the pool in the meantime
  return *existing;
}

}  // namespace

int32_t count_available_cores(GetAffinity get_affinity) {
  // The call fails with EINVAL if the set is smaller than the kernel's, which may have more than the 1,024 cores of a
  // cpu_set_t.
  constexpr size_t kMaxSets = 1024;
  for (size_t sets = 1; sets <= kMaxSets; sets *= 2) {
    std::vector<cpu_set_t> cores(sets);
    const size_t bytes = sets * sizeof(cpu_set_t);
    if (get_affinity(0, bytes, cores.data()) == 0) return CPU_COUNT_S(bytes, cores.data());
    if (errno != EINVAL) break;
  }
  return 1;
}

Executor pool_executor() {
  // These threads sleep between calls, so waking one takes longer than with torch's pool. Two threads are faster from
  // about 2M tokens in total (docs/design/kernels.md).
  constexpr int64_t kMinTokensPerThread = int64_t{1} << 20;
  static const int32_t threads = default_num_threads();
  const auto run = [](const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
    get_pool().run(num_tasks, fn, context);
  };
  return {run, threads, kMinTokensPerThread, nullptr};
}

}  // namespace ngram_npu::cpu
