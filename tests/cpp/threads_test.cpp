// Tests calls that use several threads, and concurrent calls. This suite also runs with TSan.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/machine.h"
#include "instruction_sets.h"

namespace ngram_npu::test {

namespace {

// Runs a function in a forked child process. Returns whether the function returned true there. The alarm ends a child
// with a deadlock.
template <class Fn>
bool succeeds_in_child(const Fn& fn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(fn() ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The following tests compare a scan by several threads with a scan by one thread. No step contains a row twice,
// because the threads would then race.

// Minimum number of tokens per thread in these tests. The number is small, so that the tests are fast.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

// Starts one thread per task. Counts the calls, and the tasks of the last call.
class ThreadExecutor {
 public:
  explicit ThreadExecutor(int32_t max_threads, int64_t min_tokens_per_thread = kTokensPerThread)
      : executor_{run, max_threads, min_tokens_per_thread, this} {}

  const Executor* get() const { return &executor_; }
  int32_t num_calls() const { return num_calls_; }
  int32_t num_tasks() const { return num_tasks_; }

 private:
  static void run(const Executor* self, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
    auto& executor = *static_cast<ThreadExecutor*>(self->pool);
    ++executor.num_calls_;
    executor.num_tasks_ = num_tasks;
    std::vector<std::thread> threads;
    for (int32_t task = 0; task < num_tasks; ++task) threads.emplace_back(fn, context, task);
    for (std::thread& thread : threads) thread.join();
  }

  Executor executor_;
  int32_t num_calls_ = 0;
  int32_t num_tasks_ = 0;
};

// Runs all tasks on one thread, the last task first. The results must not depend on the order or the number of threads.
void run_tasks_backwards(const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
  for (int32_t task = num_tasks - 1; task >= 0; --task) fn(context, task);
}

class ThreadsTest : public InstructionSetTest {
 protected:
  void TearDown() override {
    ngram_npu_cpu_set_num_threads(0);
    InstructionSetTest::TearDown();
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, ThreadsTest, testing::ValuesIn(list_instruction_sets()), get_instruction_set_name);

// Rows of different lengths with work for several threads, and space for the sampled tokens.
struct Batch {
  static constexpr int64_t kRows = 48;
  static constexpr int64_t kCapacity = 14 * 1024;
  static constexpr int64_t kWidth = 6;
  static constexpr int64_t kDrafts = 5;

  // The lengths grow from half the capacity to the capacity. Their sum is 3/4 of 48 * 14k tokens, which is enough work
  // for three threads.
  Batch() : tokens(static_cast<size_t>(kRows * kCapacity)), num_tokens(kRows), sampled(kRows * kWidth, -1) {
    RandomChoices random(5);
    const Tokens phrase = make_random_row(random, 997, 50000);
    for (int64_t i = 0; i < kRows * kCapacity; ++i) {
      tokens[static_cast<size_t>(i)] = phrase[static_cast<size_t>((i * 31 + i / 613) % 997)];
    }
    for (int64_t r = 0; r < kRows; ++r) {
      num_tokens[static_cast<size_t>(r)] = static_cast<int32_t>(kCapacity / 2 + r * kCapacity / (2 * kRows));
      // Samples continue some position of the row, so that most rows match and draft.
      const int64_t source = r * kCapacity + 100 + random.below(kCapacity / 4);
      for (int64_t j = 0; j < r % (kWidth + 1); ++j) {
        sampled[static_cast<size_t>(r * kWidth + j)] = tokens[static_cast<size_t>(source + j)];
      }
    }
  }

  // Tokens, lengths, next tokens, numbers of sampled tokens, drafts, draft lengths, match lengths.
  using Results = std::vector<Tokens>;

  Results run_step(const Executor* executor, int32_t match_policy) const {
    const Tokens filler(kRows, 77);
    Results results = {tokens, num_tokens, filler, filler, Tokens(kRows * kDrafts, 77), filler, filler};
    NgramStepParams params{};
    params.token_ids = {results[0].data(), kRows, kCapacity, kCapacity};
    params.num_tokens = results[1].data();
    params.sampled_token_ids = {sampled.data(), kRows, kWidth, kWidth};
    params.batch = kRows;
    params.advance = true;
    params.lookup = {2, 5, kDrafts, kNoLimit, 50000, match_policy, true, false};
    params.next_token_ids = results[2].data();
    params.num_sampled = results[3].data();
    params.draft_token_ids = {results[4].data(), params.lookup.k, 4};
    params.num_draft_tokens = results[5].data();
    params.match_len = results[6].data();
    params.executor = executor;
    EXPECT_EQ(ngram_npu_cpu_ngram_step_(&params, nullptr), kOk);
    return results;
  }

  Tokens tokens, num_tokens, sampled;
};

const Batch& get_batch() {
  static const Batch batch;
  return batch;
}

TEST_P(ThreadsTest, ResultsOfSeveralThreadsEqualThoseOfOneThread) {
  const Executor backward_executor{run_tasks_backwards, 3, kTokensPerThread, nullptr};
  for (const int32_t match_policy : {kEarliest, kLatest}) {
    const Batch::Results expected = get_batch().run_step(nullptr, match_policy);
    const auto num_empty_drafts = std::count(expected[5].begin(), expected[5].end(), 0);
    EXPECT_LT(num_empty_drafts, Batch::kRows / 2);  // otherwise too few drafts were compared
    ThreadExecutor threads(4);
    EXPECT_TRUE(get_batch().run_step(threads.get(), match_policy) == expected);
    EXPECT_EQ(threads.num_tasks(), 3);
    EXPECT_EQ(threads.num_calls(), 1);
    EXPECT_TRUE(get_batch().run_step(&backward_executor, match_policy) == expected);
  }
}

TEST_P(ThreadsTest, NumberOfThreadsIsLimitedByExecutorWorkAndCaller) {
  struct Limits {
    int32_t executor_limit;
    int64_t min_tokens_per_thread;
    int32_t caller_limit, expected_tasks;
  };
  const Limits all_limits[] = {
      {2, kTokensPerThread, 0, 2},        // limited by the executor
      {64, kTokensPerThread, 0, 3},       // limited by the work: enough for three threads
      {64, kTokensPerThread / 4, 0, 15},  // this executor needs less work per thread
      {64, kTokensPerThread, 2, 2},       // limited by the caller
      {64, kTokensPerThread, 1, 0},       // one thread needs no executor
      {64, kTokensPerThread, -5, 3},      // a negative limit is ignored
  };
  for (const Limits& limits : all_limits) {
    ngram_npu_cpu_set_num_threads(limits.caller_limit);
    EXPECT_EQ(ngram_npu_cpu_num_threads(), std::max(0, limits.caller_limit));
    ThreadExecutor threads(limits.executor_limit, limits.min_tokens_per_thread);
    get_batch().run_step(threads.get(), kEarliest);
    EXPECT_EQ(threads.num_tasks(), limits.expected_tasks) << "caller limit " << limits.caller_limit;
  }
}

// The work is the number of tokens in the rows of the batch. Several threads are used if the work per thread is at
// least the minimum. Invalid lengths and rows are no work, and there are at most as many threads as requests.
TEST_P(ThreadsTest, NumberOfThreadsFollowsWorkAndBatchSize) {
  const Tokens row(static_cast<size_t>(2 * kTokensPerThread), 7);
  const auto count_tasks = [&](const std::vector<int32_t>& lengths, const std::vector<int64_t>& indices) {
    Tokens drafts(indices.size()), num_draft(indices.size()), match_len(indices.size());
    ThreadExecutor threads(8);
    NgramProposeParams params{};
    // All rows are the same memory, which threads may read at the same time.
    params.token_ids = {row.data(), static_cast<int64_t>(lengths.size()), static_cast<int64_t>(row.size()), 0};
    params.num_tokens = lengths.data();
    params.row_indices = {indices.data(), 8};
    params.batch = static_cast<int64_t>(indices.size());
    params.lookup = {1, 1, 1, kNoLimit, kAnyToken, kEarliest, false, false};
    params.draft_token_ids = {drafts.data(), params.lookup.k, 4};
    params.num_draft_tokens = num_draft.data();
    params.match_len = match_len.data();
    params.executor = threads.get();
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&params, nullptr), kOk);
    return threads.num_calls() == 0 ? 1 : threads.num_tasks();
  };
  constexpr auto min_tokens = static_cast<int32_t>(kTokensPerThread);
  EXPECT_EQ(count_tasks({min_tokens, min_tokens}, {0, 1}), 2);
  EXPECT_EQ(count_tasks({min_tokens, min_tokens - 1}, {0, 1}), 1);
  EXPECT_EQ(count_tasks({min_tokens, min_tokens}, {0}), 1);
  EXPECT_EQ(count_tasks({min_tokens}, {0, 0, 0}), 3);
  EXPECT_EQ(count_tasks({2 * min_tokens}, {0}), 1);
  EXPECT_EQ(count_tasks({min_tokens, 5, 5}, {0, 0, 1, 2, 2}), 2);
  EXPECT_EQ(count_tasks({min_tokens, 2 * min_tokens + 1, -min_tokens}, {0, 1, 2, 1, 2}), 1);
  EXPECT_EQ(count_tasks({min_tokens, min_tokens}, {0, -1, 2, int64_t{1} << 40}), 1);
  EXPECT_EQ(count_tasks({}, {}), 1);
}

}  // namespace

// Tests the thread pool of ngram_npu._C.
namespace {

// Runs tasks in the pool. Returns whether each task ran once. Each task has its own int, which is not atomic, so that
// TSan reports a run() that returns too early.
bool runs_each_task_once(int32_t num_tasks) {
  std::vector<int> counts(static_cast<size_t>(num_tasks));
  const Executor executor = cpu::pool_executor();
  executor.run(
      &executor, num_tasks, [](void* context, int32_t task) { ++static_cast<int*>(context)[task]; }, counts.data());
  return std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
}

// If the pool is busy, a caller does not wait, but runs its tasks on its own thread.
TEST(ThreadPoolTest, ConcurrentCallersRunEachTaskOnce) {
  std::atomic<int> num_failures{0};
  std::vector<std::thread> callers;
  for (int32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&num_failures, caller] {
      for (int32_t round = 0; round < 1000; ++round) {
        num_failures += !runs_each_task_once((caller + round) % 9);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_failures.load(), 0);
}

TEST(ThreadPoolTest, CallToBusyPoolDoesNotWait) {
  struct State {
    std::atomic<int> num_running{0};
    std::atomic<bool> may_end{false};
  } state;
  std::thread blocking_thread([&state] {
    const Executor executor = cpu::pool_executor();
    executor.run(
        &executor, 2,
        [](void* context, int32_t) {
          auto& running_state = *static_cast<State*>(context);
          ++running_state.num_running;
          while (!running_state.may_end) std::this_thread::yield();
        },
        &state);
  });
  while (state.num_running != 2) std::this_thread::yield();  // both tasks run at the same time
  EXPECT_TRUE(runs_each_task_once(3));                       // never returns if the call waits for the pool
  state.may_end = true;
  blocking_thread.join();
}

// sched_getaffinity of a machine whose kernel has sets of 4,096 cores, of which 1,500 are available.
int get_affinity_of_large_machine(pid_t, size_t bytes, cpu_set_t* cores) {
  constexpr size_t kKernelBytes = 4096 / 8;
  if (bytes < kKernelBytes) {
    errno = EINVAL;
    return -1;
  }
  for (size_t core = 0; core < 1500; ++core) CPU_SET_S(core, bytes, cores);
  return 0;
}

TEST(CoreCountTest, MoreCoresThanOneSetAreCounted) {
  EXPECT_EQ(cpu::count_available_cores(get_affinity_of_large_machine), 1500);
}

TEST(CoreCountTest, FailingSystemCallGivesOneCore) {
  for (const int error : {EINVAL, EPERM}) {
    static int error_to_return;
    error_to_return = error;
    const auto fail = [](pid_t, size_t, cpu_set_t*) {
      errno = error_to_return;
      return -1;
    };
    EXPECT_EQ(cpu::count_available_cores(fail), 1);
  }
}

// Exits with status 0 if the pool has the expected maximum number of threads.
[[noreturn]] void exit_after_thread_check(const char* omp_num_threads, int32_t expected) {
  setenv("OMP_NUM_THREADS", omp_num_threads, 1);
  std::_Exit(cpu::pool_executor().max_threads == expected ? 0 : 1);
}

// The test binary is executed again, because the pool reads the environment at first use.
TEST(ThreadPoolDeathTest, OmpNumThreadsOverridesTheNumberOfCores) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const int32_t num_cores = cpu::count_available_cores();
  const std::pair<const char*, int32_t> cases[] = {
      {"3", 3}, {"1", 1}, {"5,2", 5}, {"99999999999999", 1024}, {"0", num_cores}, {"many", num_cores}};
  for (const auto& [value, expected] : cases) {
    EXPECT_EXIT(exit_after_thread_check(value, expected), testing::ExitedWithCode(0), "") << value;
  }
}

// TSan does not support these tests: if a process with threads forks, TSan ends the child when it starts a thread.
#if !defined(__SANITIZE_THREAD__)

bool pool_works() { return runs_each_task_once(3) && runs_each_task_once(4) && runs_each_task_once(2); }

// A data loader may fork at any time, also while another thread is inside a call.
TEST(ThreadPoolForkTest, PoolWorksInForkedChildAndGrandchildWhileParentUsesPool) {
  // No other thread may allocate memory or begin during a fork, because it could hold a lock of ASan, which the child
  // could never take. So all threads of the pool and of this test run before the first fork.
  ASSERT_TRUE(pool_works());
  std::atomic<bool> must_stop{false};
  std::atomic<int> num_running{0};
  std::vector<std::thread> other_threads;
  for (int i = 0; i < 2; ++i) {
    other_threads.emplace_back([&must_stop, &num_running] {
      const Executor executor = cpu::pool_executor();
      ++num_running;
      while (!must_stop) executor.run(&executor, 2, [](void*, int32_t) {}, nullptr);
    });
  }
  while (num_running < 2) std::this_thread::yield();
  int num_failed = 0;
  for (int i = 0; i < 150 && num_failed == 0; ++i)
    num_failed +=
        !succeeds_in_child([i] { return pool_works() && (i > 0 || succeeds_in_child(pool_works)) && pool_works(); });
  must_stop = true;
  for (std::thread& thread : other_threads) thread.join();
  EXPECT_EQ(num_failed, 0);
}

#endif

}  // namespace
}  // namespace ngram_npu::test
