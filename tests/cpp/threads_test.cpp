// Tests calls that use several threads, and concurrent calls. This suite also runs with TSan.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/ngram_index_layout.h"
#include "cpu/machine.h"
#include "entry_points.h"
#include "instruction_sets.h"

namespace ngram_npu::test {

namespace {

// Runs a function in a forked child process. Returns whether the function returned true there. The alarm ends a child
// with a deadlock.
template <class Fn>
bool succeeds_in_child(const Fn& fn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
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
    params.vocab_size = 50000;
    params.lookup = {2, 5, kDrafts, kNoLimit, match_policy, true, false, nullptr, 0};
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
    params.lookup = {1, 1, 1, kNoLimit, kEarliest, false, false, nullptr, 0};
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

// Tests that an index to which several threads append gives the same drafts as an index built by one thread, with
// enough pages and with too few.
namespace {

constexpr int64_t kRows = 12, kCapacity = 6000, kDrafts = 4;

// Options of the index operators.
struct Lookup {
  LookupOptions options;
  bool ladder = false;
  const uint8_t* costs = nullptr;
};

LookupOptions make_options(int64_t min_n, int64_t max_n, int32_t match_policy) {
  return {min_n, max_n, kDrafts, kNoLimit, match_policy, false, false, nullptr, 0};
}

// Rows and their index.
class IndexedRows {
 public:
  IndexedRows(int64_t pages, Tokens tokens, Lookup lookup = {make_options(2, 4, kEarliest)})
      : num_pages_(pages), tokens_(std::move(tokens)), lookup_(lookup) {}

  // Appends to all rows if no slots are given.
  void append_to_index(const Executor* executor, const Tokens& slots = {}) {
    const NgramIndexAppendParams params{{tokens_.data(), kRows, kCapacity, kCapacity},
                                        lengths_.data(),
                                        {},
                                        slots.empty() ? kRows : length_of(slots),
                                        lookup_.options.min_n,
                                        lookup_.options.max_n,
                                        lookup_.options.match_policy,
                                        lookup_.ladder,
                                        lookup_.costs != nullptr,
                                        index_.access({slots.data(), slots.empty() ? 0 : 4}),
                                        executor};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_append_(&params, nullptr), kOk);
  }

  void reset_slots(const Tokens& slots) {
    const NgramIndexResetParams params{index_.access({slots.data(), 4}), length_of(slots)};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_reset_(&params, nullptr), kOk);
  }

  // Appends the rows to the index, then drafts in steps in which the rows grow. Returns all drafts and their costs.
  Tokens append_and_draft(const Executor* executor) {
    std::fill(lengths_.begin(), lengths_.end(), kCapacity - 100);
    append_to_index(executor);
    EXPECT_EQ(index_.find_fault(), 0);
    Tokens results, num_draft(kRows), match_len(kRows), drafts(kRows * kDrafts);
    std::vector<uint8_t> draft_costs(kRows * kDrafts);
    for (int step = 0; step < 15; ++step) {
      for (int32_t& length : lengths_) length += 3;
      NgramIndexProposeParams params{};
      params.propose.token_ids = {tokens_.data(), kRows, kCapacity, kCapacity};
      params.propose.num_tokens = lengths_.data();
      params.propose.batch = kRows;
      params.propose.lookup = lookup_.options;
      params.propose.draft_token_ids = {drafts.data(), kDrafts, 4};
      params.propose.num_draft_tokens = num_draft.data();
      params.propose.match_len = match_len.data();
      params.index = index_.access();
      params.catch_up_tokens = -1;
      params.ladder = {lookup_.ladder, lookup_.costs, 40};
      if (lookup_.costs != nullptr) params.propose.draft_costs = {draft_costs.data(), kDrafts};
      EXPECT_EQ(ngram_npu_cpu_ngram_index_propose_(&params, nullptr), kOk);
      results.insert(results.end(), drafts.begin(), drafts.end());
      results.insert(results.end(), draft_costs.begin(), draft_costs.end());
    }
    return results;
  }

  // Writes a slot state with the largest directory, whose entries all refer to page 0. No slot owns page 0, so
  // resetting the slot frees no pages, but takes long.
  void make_reset_slow(int64_t slot) {
    int32_t* state = index_.data() + index::kHeaderWords + slot * index::kSlotWords;
    state[index::kSlotPages] = 1;
    state[index::kSlotDepth] = index::kMaxDepth;
    std::fill_n(index_.end() - num_pages_ * index::kPageWords, index::kPageWords,
                static_cast<int32_t>(index::kMaxDepth));
  }

  bool is_valid(int64_t slot, int64_t row) {
    return index_.find_fault() == 0 &&
           ngram_npu_cpu_ngram_index_check_row(index_.data(), index_.count(), slot, tokens_.data() + row * kCapacity,
                                               kCapacity) == 0;
  }

 private:
  const int64_t num_pages_;
  Tokens tokens_, lengths_ = Tokens(kRows, kCapacity);
  const Lookup lookup_;
  Index index_{kRows, num_pages_};
};

TEST(IndexThreadsTest, DraftsOfSeveralThreadsEqualThoseOfOneThread) {
  RandomChoices random(3);
  std::vector<uint8_t> costs(kCostRows * kRowCostColumns);
  for (uint8_t& cost : costs) cost = static_cast<uint8_t>(random.below(40));
  const LookupOptions ladder = make_options(1, kLadderMaxN, kLatest);
  const Lookup lookups[] = {
      {make_options(2, 4, kEarliest)}, {make_options(2, 4, kLatest)}, {ladder, true}, {ladder, true, costs.data()}};
  for (const int64_t vocab_size : {40, 3000}) {
    const Tokens tokens = make_random_row(random, kRows * kCapacity, vocab_size);
    for (const Lookup& lookup : lookups) {
      for (const int64_t pages : {1000, 60}) {  // 60 pages are too few for all rows
        // With too few pages, the order of the threads decides which rows have no pages and therefore no outcomes.
        if (pages == 60 && lookup.costs != nullptr) continue;
        ThreadExecutor threads(4, 1000);
        EXPECT_EQ(IndexedRows(pages, tokens, lookup).append_and_draft(threads.get()),
                  IndexedRows(pages, tokens, lookup).append_and_draft(nullptr));
        EXPECT_EQ(threads.num_tasks(), 4);
      }
    }
  }
}

TEST(IndexThreadsTest, DuplicateSlotsAreIndexedByOneThread) {
  RandomChoices random(5);
  const ThreadExecutor threads(4, 1000);
  IndexedRows indexed_rows(1000, make_random_row(random, kRows * kCapacity, 300));
  indexed_rows.append_to_index(threads.get(), {3, 3, 5, 3, -1, -1, 99});
  EXPECT_EQ(threads.num_calls(), 0);
  EXPECT_TRUE(indexed_rows.is_valid(3, 3));
  EXPECT_TRUE(indexed_rows.is_valid(5, 2));
  indexed_rows.append_to_index(threads.get(), {3, 4, 5, 6, -1, -1, 99});
  EXPECT_EQ(threads.num_tasks(), 4);
  EXPECT_TRUE(indexed_rows.is_valid(6, 3));
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support forking a process with threads

TEST(IndexThreadsTest, ForkedChildAppendsWhileParentUsesIndex) {
  RandomChoices random(5);
  const Tokens tokens = make_random_row(random, kRows * kCapacity, 300);
  IndexedRows parent_rows(10, tokens), child_rows(200, tokens);
  std::atomic<bool> must_stop{false};
  std::thread reset_thread([&] {  // is nearly always inside ngram_index_reset_, and does not call malloc
    const Tokens slot = {0};
    while (!must_stop) {
      parent_rows.make_reset_slow(0);
      parent_rows.reset_slots(slot);
    }
  });
  bool succeeded = true;
  for (int i = 0; i < 5 && succeeded; ++i) {
    succeeded = succeeds_in_child([&] {
      child_rows.append_to_index(nullptr, {7});
      return child_rows.is_valid(7, 0);
    });
  }
  must_stop = true;
  reset_thread.join();
  EXPECT_TRUE(succeeded);
}

#endif

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

// Exits with status 0 if the pool has the expected maximum number of threads.
[[noreturn]] void exit_after_thread_check(const char* omp_num_threads, int32_t expected) {
  setenv("OMP_NUM_THREADS", omp_num_threads, 1);
  std::_Exit(cpu::pool_executor().max_threads == expected ? 0 : 1);
}

// The test binary is executed again, because the pool reads the environment at first use.
TEST(ThreadPoolDeathTest, OmpNumThreadsOverridesTheNumberOfCores) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  const std::pair<const char*, int32_t> cases[] = {
      {"3", 3}, {"1", 1}, {"5,2", 5}, {"99999999999999", 1024}, {"0", CPU_COUNT(&cores)}, {"many", CPU_COUNT(&cores)}};
  for (const auto& [value, expected] : cases) {
    EXPECT_EXIT(exit_after_thread_check(value, expected), testing::ExitedWithCode(0), "") << value;
  }
}

// TSan does not support these tests: if a process with threads forks, TSan ends the child when it starts a thread.
#if !defined(__SANITIZE_THREAD__)

bool pool_works() { return runs_each_task_once(3) && runs_each_task_once(4) && runs_each_task_once(2); }

// A data loader may fork at any time, also while another thread is inside a call.
TEST(ThreadPoolForkTest, PoolWorksInForkedChildAndGrandchildWhileParentUsesPool) {
  std::atomic<bool> must_stop{false};
  std::vector<std::thread> other_threads;
  for (int i = 0; i < 2; ++i) {
    other_threads.emplace_back([&must_stop] {
      // This loop must not allocate memory, so that a fork cannot interrupt a thread that holds a lock of malloc.
      const Executor executor = cpu::pool_executor();
      while (!must_stop) executor.run(&executor, 2, [](void*, int32_t) {}, nullptr);
    });
  }
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
