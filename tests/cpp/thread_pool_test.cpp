// The thread pool of `_C`, compiled into this test.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace ngram_npu::test {
namespace {

// The number of calls of each task of a run. Each task has its own plain int, so that TSan reports a run() that returns
// too early.
std::vector<int> run(int32_t num_tasks) {
  std::vector<int> counts(static_cast<size_t>(num_tasks));
  const Executor executor = cpu::pool_executor();
  executor.run(
      &executor, num_tasks, [](void* context, int32_t task) { ++static_cast<int*>(context)[task]; }, counts.data());
  return counts;
}

std::vector<int> once_each(int32_t num_tasks) { return std::vector<int>(static_cast<size_t>(num_tasks), 1); }

TEST(ThreadPoolTest, EveryTaskRunsOnce) {
  for (const int32_t num_tasks : {1, 2, 3, 8, 2, 1, 5, 8}) ASSERT_EQ(run(num_tasks), once_each(num_tasks));
}

TEST(ThreadPoolTest, NoTasksNoCalls) { EXPECT_TRUE(run(0).empty()); }

TEST(ThreadPoolTest, ManyRounds) {
  for (int32_t round = 0; round < 5000; ++round) {
    const int32_t num_tasks = 1 + round % 4;
    ASSERT_EQ(run(num_tasks), once_each(num_tasks)) << round;
  }
}

// A caller does not wait for a busy pool, but works on its own thread.
TEST(ThreadPoolTest, ConcurrentCallers) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int32_t round = 0; round < 1000; ++round) {
        const int32_t num_tasks = 1 + (caller + round) % 4;
        wrong += run(num_tasks) != once_each(num_tasks);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPoolTest, ABusyPoolMakesNobodyWait) {
  struct Shared {
    std::atomic<int> inside{0};
    std::atomic<bool> leave{false};
  } shared;
  std::thread holder([&shared] {
    const Executor executor = cpu::pool_executor();
    executor.run(
        &executor, 2,
        [](void* context, int32_t) {
          auto& s = *static_cast<Shared*>(context);
          ++s.inside;
          while (!s.leave) std::this_thread::yield();
        },
        &shared);
  });
  while (shared.inside != 2) std::this_thread::yield();  // both tasks run at once, on different threads
  EXPECT_EQ(run(3), once_each(3));                       // would hang if it waited
  shared.leave = true;
  holder.join();
}

[[noreturn]] void offers(const char* omp_num_threads, int32_t expected) {
  setenv("OMP_NUM_THREADS", omp_num_threads, 1);
  std::_Exit(cpu::pool_executor().max_threads == expected ? 0 : 1);
}

// Re-executed: the environment is read at first use.
TEST(ThreadPoolDeathTest, OmpNumThreadsCountsElseTheCores) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  EXPECT_EXIT(offers("3", 3), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("1", 1), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("5,2", 5), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("99999999999999", 1024), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("0", CPU_COUNT(&cores)), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("-4", CPU_COUNT(&cores)), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(offers("many", CPU_COUNT(&cores)), testing::ExitedWithCode(0), "");
}

// TSan does not support these tests: it ends a process with threads' child as soon as the child starts a thread.
#if !defined(__SANITIZE_THREAD__)

bool works() { return run(3) == once_each(3) && run(4) == once_each(4) && run(2) == once_each(2); }

// The exit status shows whether it does. The alarm turns a deadlock into a signal.
bool does_in_a_child(bool (*what)()) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(what() ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ThreadPoolForkTest, AChildHasAPoolOfItsOwn) {
  ASSERT_TRUE(works());
  EXPECT_TRUE(does_in_a_child(works));
  EXPECT_TRUE(works());  // and the parent keeps its own
}

TEST(ThreadPoolForkTest, AGrandchildToo) {
  ASSERT_TRUE(works());
  EXPECT_TRUE(does_in_a_child([] { return works() && does_in_a_child(works) && works(); }));
}

// A data loader may fork at any time, also while another thread is inside a call.
TEST(ThreadPoolForkTest, ForkWhileOthersUseThePool) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> users;
  for (int i = 0; i < 2; ++i) {
    users.emplace_back([&stop] {
      // Must not allocate: the fork may interrupt only the pool's own state.
      const Executor executor = cpu::pool_executor();
      while (!stop) executor.run(&executor, 2, [](void*, int32_t) {}, nullptr);
    });
  }
  int failed = 0;
  for (int i = 0; i < 150 && failed == 0; ++i) failed += !does_in_a_child(works);
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(failed, 0);
}

#endif

}  // namespace
}  // namespace ngram_npu::test
