// Calls with several threads. This suite runs under TSan too.
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

// Runs a function in a forked child, and returns whether it returned true there. The alarm turns a deadlock into a
// signal.
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

// The scan. No test uses a row twice in a step, which would be the caller's race.

// The minimum work per thread of the executors here; small, so that the tests are fast.
constexpr int64_t kTokensPerThread = int64_t{1} << 17;

// One thread per task; counts calls and tasks.
class ThreadExecutor {
 public:
  explicit ThreadExecutor(int32_t max_threads, int64_t min_tokens_per_thread = kTokensPerThread)
      : executor_{run, max_threads, min_tokens_per_thread, this} {}

  const Executor* get() const { return &executor_; }
  int32_t calls() const { return calls_; }
  int32_t tasks() const { return tasks_; }

 private:
  static void run(const Executor* self, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
    auto& me = *static_cast<ThreadExecutor*>(self->pool);
    ++me.calls_;
    me.tasks_ = num_tasks;
    std::vector<std::thread> threads;
    for (int32_t task = 0; task < num_tasks; ++task) threads.emplace_back(fn, context, task);
    for (std::thread& thread : threads) thread.join();
  }

  Executor executor_;
  int32_t calls_ = 0;
  int32_t tasks_ = 0;
};

// Runs all tasks on one thread, the last task first. Callers may not rely on another order or on several threads.
void run_backwards(const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
  for (int32_t task = num_tasks - 1; task >= 0; --task) fn(context, task);
}

class ThreadsTest : public InstructionSetTest {
 protected:
  void TearDown() override {
    ngram_npu_cpu_set_num_threads(0);
    InstructionSetTest::TearDown();
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, ThreadsTest, testing::ValuesIn(instruction_sets()), get_instruction_set_name);

// Rows of different lengths with work for several threads, and space for the sampled tokens.
struct Batch {
  static constexpr int64_t kRows = 48;
  static constexpr int64_t kCapacity = 14 * 1024;
  static constexpr int64_t kWidth = 6;
  static constexpr int64_t kDrafts = 5;

  // Lengths from half the capacity up: three quarters of 48 * 14k tokens are work for three threads.
  Batch() : tokens(static_cast<size_t>(kRows * kCapacity)), num_tokens(kRows), sampled(kRows * kWidth, -1) {
    RandomChoices random(5);
    const Tokens phrase = make_random_row(random, 997, 50000);
    for (int64_t i = 0; i < kRows * kCapacity; ++i) {
      tokens[static_cast<size_t>(i)] = phrase[static_cast<size_t>((i * 31 + i / 613) % 997)];
    }
    for (int64_t r = 0; r < kRows; ++r) {
      num_tokens[static_cast<size_t>(r)] = static_cast<int32_t>(kCapacity / 2 + r * kCapacity / (2 * kRows));
      // Samples continue some position of the row, so that most rows match and draft.
      const int64_t from = r * kCapacity + 100 + random.below(kCapacity / 4);
      for (int64_t j = 0; j < r % (kWidth + 1); ++j) {
        sampled[static_cast<size_t>(r * kWidth + j)] = tokens[static_cast<size_t>(from + j)];
      }
    }
  }

  using Results = std::vector<Tokens>;  // tokens, lengths, next token, number of samples, drafts, counts, match lengths

  Results step(const Executor* executor, int32_t match_policy) const {
    const Tokens unset(kRows, 77);
    Results out = {tokens, num_tokens, unset, unset, Tokens(kRows * kDrafts, 77), unset, unset};
    NgramStepParams p{};
    p.token_ids = {out[0].data(), kRows, kCapacity, kCapacity};
    p.num_tokens = out[1].data();
    p.sampled_token_ids = {sampled.data(), kRows, kWidth, kWidth};
    p.batch = kRows;
    p.advance = true;
    p.vocab_size = 50000;
    p.lookup = {2, 5, kDrafts, kNoLimit, match_policy, true, false, nullptr, 0};
    p.next_token_ids = out[2].data();
    p.num_sampled = out[3].data();
    p.draft_token_ids = {out[4].data(), p.lookup.k, 4};
    p.num_draft_tokens = out[5].data();
    p.match_len = out[6].data();
    p.executor = executor;
    EXPECT_EQ(ngram_npu_cpu_ngram_step_(&p, nullptr), kOk);
    return out;
  }

  Tokens tokens, num_tokens, sampled;
};

const Batch& batch() {
  static const Batch shared;
  return shared;
}

TEST_P(ThreadsTest, SeveralThreadsEqualOneThread) {
  const Executor backwards{run_backwards, 3, kTokensPerThread, nullptr};
  for (const int32_t match_policy : {kEarliest, kLatest}) {
    const Batch::Results expected = batch().step(nullptr, match_policy);
    const auto undrafted = std::count(expected[5].begin(), expected[5].end(), 0);
    EXPECT_LT(undrafted, Batch::kRows / 2);  // otherwise too few drafts were compared
    ThreadExecutor threads(4);
    EXPECT_TRUE(batch().step(threads.get(), match_policy) == expected);
    EXPECT_EQ(threads.tasks(), 3);
    EXPECT_EQ(threads.calls(), 1);
    EXPECT_TRUE(batch().step(&backwards, match_policy) == expected);
  }
}

TEST_P(ThreadsTest, ThreadsAreLimitedByExecutorWorkAndCaller) {
  struct Case {
    int32_t executor_limit;
    int64_t min_tokens_per_thread;
    int32_t caller_limit, expected_tasks;
  };
  const Case cases[] = {
      {2, kTokensPerThread, 0, 2},        // the executor's limit
      {64, kTokensPerThread, 0, 3},       // enough work for three threads
      {64, kTokensPerThread / 4, 0, 15},  // this executor needs less work per thread
      {64, kTokensPerThread, 2, 2},       // the caller's limit
      {64, kTokensPerThread, 1, 0},       // one thread needs no executor
      {64, kTokensPerThread, -5, 3},      // no limit
  };
  for (const Case& c : cases) {
    ngram_npu_cpu_set_num_threads(c.caller_limit);
    EXPECT_EQ(ngram_npu_cpu_num_threads(), std::max(0, c.caller_limit));
    ThreadExecutor threads(c.executor_limit, c.min_tokens_per_thread);
    batch().step(threads.get(), kEarliest);
    EXPECT_EQ(threads.tasks(), c.expected_tasks) << "caller limit " << c.caller_limit;
  }
}

// The work is the number of tokens that a pass reads: threads are used from the crossover on, never for invalid lengths
// or rows, and never more threads than rows.
TEST_P(ThreadsTest, ThreadsAreUsedFromTheCrossoverOn) {
  const Tokens row(static_cast<size_t>(2 * kTokensPerThread), 7);
  const auto tasks_for = [&](const std::vector<int32_t>& lengths, const std::vector<int64_t>& indices) {
    Tokens drafts(indices.size()), num_draft(indices.size()), match_len(indices.size());
    ThreadExecutor threads(8);
    NgramProposeParams p{};
    // All rows are the same memory, which threads may read at the same time.
    p.token_ids = {row.data(), static_cast<int64_t>(lengths.size()), static_cast<int64_t>(row.size()), 0};
    p.num_tokens = lengths.data();
    p.row_indices = {indices.data(), 8};
    p.batch = static_cast<int64_t>(indices.size());
    p.lookup = {1, 1, 1, kNoLimit, kEarliest, false, false, nullptr, 0};
    p.draft_token_ids = {drafts.data(), p.lookup.k, 4};
    p.num_draft_tokens = num_draft.data();
    p.match_len = match_len.data();
    p.executor = threads.get();
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
    return threads.calls() == 0 ? 1 : threads.tasks();
  };
  constexpr auto full = static_cast<int32_t>(kTokensPerThread);
  EXPECT_EQ(tasks_for({full, full}, {0, 1}), 2);
  EXPECT_EQ(tasks_for({full, full - 1}, {0, 1}), 1);
  EXPECT_EQ(tasks_for({full, full}, {0}), 1);
  EXPECT_EQ(tasks_for({full}, {0, 0, 0}), 3);
  EXPECT_EQ(tasks_for({2 * full}, {0}), 1);
  EXPECT_EQ(tasks_for({full, 5, 5}, {0, 0, 1, 2, 2}), 2);
  EXPECT_EQ(tasks_for({full, 2 * full + 1, -full}, {0, 1, 2, 1, 2}), 1);
  EXPECT_EQ(tasks_for({full, full}, {0, -1, 2, int64_t{1} << 40}), 1);
  EXPECT_EQ(tasks_for({}, {}), 1);
}

}  // namespace

// An index to which several threads append gives the same drafts as an index built by one thread, with enough memory
// and with too little.
namespace {

constexpr int64_t kRows = 12, kCapacity = 6000, kDrafts = 4;

struct Lookup {
  LookupOptions options;
  bool ladder = false;
  const uint8_t* costs = nullptr;
};

LookupOptions options(int64_t min_n, int64_t max_n, int32_t match_policy) {
  return {min_n, max_n, kDrafts, kNoLimit, match_policy, false, false, nullptr, 0};
}

// Rows and an index of them.
class Indexed {
 public:
  Indexed(int64_t pages, Tokens tokens, Lookup lookup = {options(2, 4, kEarliest)})
      : pages_(pages), tokens_(std::move(tokens)), lookup_(lookup) {}

  // Appends to all rows if no slots are given.
  void append(const Executor* executor, const Tokens& slots = {}) {
    const NgramIndexAppendParams params{{tokens_.data(), kRows, kCapacity, kCapacity},
                                        lengths_.data(),
                                        {},
                                        slots.empty() ? kRows : length_of(slots),
                                        lookup_.options.min_n,
                                        lookup_.options.max_n,
                                        lookup_.options.match_policy,
                                        lookup_.ladder,
                                        lookup_.costs != nullptr,
                                        words_.access({slots.data(), slots.empty() ? 0 : 4}),
                                        executor};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_append_(&params, nullptr), kOk);
  }

  void reset(const Tokens& slots) {
    const NgramIndexResetParams params{words_.access({slots.data(), 4}), length_of(slots)};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_reset_(&params, nullptr), kOk);
  }

  // The drafts of rows that grow after one append, and their costs.
  Tokens drafts_after_append(const Executor* executor) {
    std::fill(lengths_.begin(), lengths_.end(), kCapacity - 100);
    append(executor);
    EXPECT_EQ(words_.fault(), 0);
    Tokens all, num_draft(kRows), match_len(kRows), drafts(kRows * kDrafts);
    std::vector<uint8_t> paid(kRows * kDrafts);
    for (int step = 0; step < 15; ++step) {
      for (int32_t& length : lengths_) length += 3;
      NgramIndexProposeParams p{};
      p.propose.token_ids = {tokens_.data(), kRows, kCapacity, kCapacity};
      p.propose.num_tokens = lengths_.data();
      p.propose.batch = kRows;
      p.propose.lookup = lookup_.options;
      p.propose.draft_token_ids = {drafts.data(), kDrafts, 4};
      p.propose.num_draft_tokens = num_draft.data();
      p.propose.match_len = match_len.data();
      p.index = words_.access();
      p.catch_up_tokens = -1;
      p.ladder = {lookup_.ladder, lookup_.costs, 40};
      if (lookup_.costs != nullptr) p.propose.draft_costs = {paid.data(), kDrafts};
      EXPECT_EQ(ngram_npu_cpu_ngram_index_propose_(&p, nullptr), kOk);
      all.insert(all.end(), drafts.begin(), drafts.end());
      all.insert(all.end(), paid.begin(), paid.end());
    }
    return all;
  }

  // Writes a slot state with the largest directory, all of it in page 0, which has no owner: resetting it is slow.
  void make_large(int64_t slot) {
    int32_t* state = words_.data() + index::kHeaderWords + slot * index::kSlotWords;
    state[index::kSlotPages] = 1;
    state[index::kSlotDepth] = index::kMaxDepth;
    std::fill_n(words_.end() - pages_ * index::kPageWords, index::kPageWords, static_cast<int32_t>(index::kMaxDepth));
  }

  bool is_sound(int64_t slot, int64_t row) {
    return words_.fault() == 0 && ngram_npu_cpu_ngram_index_check_row(words_.data(), words_.count(), slot,
                                                                      tokens_.data() + row * kCapacity, kCapacity) == 0;
  }

 private:
  const int64_t pages_;
  Tokens tokens_, lengths_ = Tokens(kRows, kCapacity);
  const Lookup lookup_;
  Index words_{kRows, pages_};
};

TEST(IndexThreadsTest, SeveralThreadsEqualOneThread) {
  RandomChoices random(3);
  std::vector<uint8_t> costs(kCostRows * kCostColumns);
  for (uint8_t& cost : costs) cost = static_cast<uint8_t>(random.below(40));
  const LookupOptions sizes = options(1, kLadderMaxN, kLatest);
  const Lookup lookups[] = {
      {options(2, 4, kEarliest)}, {options(2, 4, kLatest)}, {sizes, true}, {sizes, true, costs.data()}};
  for (const int64_t alphabet : {40, 3000}) {
    const Tokens tokens = make_random_row(random, kRows * kCapacity, alphabet);
    for (const Lookup& lookup : lookups) {
      for (const int64_t pages : {1000, 60}) {  // 60 pages are too few
        // The threads' timing decides which rows get no memory, and those rows have no outcomes.
        if (pages == 60 && lookup.costs != nullptr) continue;
        ThreadExecutor threads(4, 1000);
        EXPECT_EQ(Indexed(pages, tokens, lookup).drafts_after_append(threads.get()),
                  Indexed(pages, tokens, lookup).drafts_after_append(nullptr));
        EXPECT_EQ(threads.tasks(), 4);
      }
    }
  }
}

TEST(IndexThreadsTest, DuplicateSlotsAreIndexedByOneThread) {
  RandomChoices random(5);
  const ThreadExecutor threads(4, 1000);
  Indexed indexed(1000, make_random_row(random, kRows * kCapacity, 300));
  indexed.append(threads.get(), {3, 3, 5, 3, -1, -1, 99});
  EXPECT_EQ(threads.calls(), 0);
  EXPECT_TRUE(indexed.is_sound(3, 3));
  EXPECT_TRUE(indexed.is_sound(5, 2));
  indexed.append(threads.get(), {3, 4, 5, 6, -1, -1, 99});
  EXPECT_EQ(threads.tasks(), 4);
  EXPECT_TRUE(indexed.is_sound(6, 3));
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support forking a process with threads

TEST(IndexThreadsTest, ForkedChildIndexesWhileItsParentIndexes) {
  RandomChoices random(5);
  const Tokens tokens = make_random_row(random, kRows * kCapacity, 300);
  Indexed parent_rows(10, tokens), child_rows(200, tokens);
  std::atomic<bool> stop{false};
  std::thread user([&] {  // nearly always owns pages of the arena, and never allocates by malloc
    const Tokens slot = {0};
    while (!stop) {
      parent_rows.make_large(0);
      parent_rows.reset(slot);
    }
  });
  bool succeeded = true;
  for (int i = 0; i < 5 && succeeded; ++i) {
    succeeded = succeeds_in_child([&] {
      child_rows.append(nullptr, {7});
      return child_rows.is_sound(7, 0);
    });
  }
  stop = true;
  user.join();
  EXPECT_TRUE(succeeded);
}

#endif

}  // namespace

// Concurrent calls on one store: one call uses the store, and the others skip it.
namespace {

constexpr int64_t kThreads = 4, kBits = 6;

// Steps of one request that counts up and starts over, in a slot of its own.
void use(SharedStore& store, int64_t slot) {
  std::vector<int32_t> row(600), drafts(kDrafts);
  std::vector<uint8_t> costs(kCostRows * store::kStoreCostColumns, 1), paid(kDrafts);
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<int32_t>(i % 50);
  const int32_t sampled = 3;
  for (int32_t length = 3; length < 600; length += 3) {
    int32_t count = 0, match = 0;
    NgramStoreStepParams p{};
    p.token_ids = {row.data(), 1, 600, 600};
    p.num_tokens = &length;
    p.num_sampled = &sampled;
    p.slot_indices = {&slot, 8};
    p.batch = 1;
    p.store = store.access();
    p.draft_token_ids = {drafts.data(), 1, kDrafts, kDrafts};
    p.num_draft_tokens = &count;
    p.match_len = &match;
    p.draft_costs = {paid.data(), 1, kDrafts, kDrafts};
    p.max_len = 1 << 20;
    p.costs = costs.data();
    p.cost_limit = 40;
    ngram_npu_cpu_ngram_store_step_(&p, nullptr);
  }
  const NgramStoreFinishParams finish{store.access(), {&slot, 8}, 1};
  ngram_npu_cpu_ngram_store_finish_(&finish, nullptr);
}

TEST(StoreThreadsTest, ConcurrentCallsLeaveTheStoreSound) {
  SharedStore store(kThreads, 5 * kThreads, kBits);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) threads.emplace_back(use, std::ref(store), i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.fault(), 0);
  // Each call used the store or was counted.
  EXPECT_EQ(store.header(store::kHeaderLock), 0u);
  EXPECT_GT(store.header(store::kStatInserted), 0u);
  const uint32_t calls = store.header(store::kStatLookups) + store.header(store::kStatSkippedCalls);
  EXPECT_LE(calls, 199u * kThreads + kThreads);
  EXPECT_GE(calls, 199u * kThreads);
}

}  // namespace

// The thread pool of ngram_npu._C.
namespace {

// Each task has its own plain int, so that TSan reports a run() that returns too early.
bool runs_each_task_once(int32_t num_tasks) {
  std::vector<int> counts(static_cast<size_t>(num_tasks));
  const Executor executor = cpu::pool_executor();
  executor.run(
      &executor, num_tasks, [](void* context, int32_t task) { ++static_cast<int*>(context)[task]; }, counts.data());
  return std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
}

// A caller does not wait for a busy pool, but works on its own thread.
TEST(ThreadPoolTest, ConcurrentCallersRunEachTaskOnce) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int32_t round = 0; round < 1000; ++round) {
        wrong += !runs_each_task_once((caller + round) % 9);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPoolTest, CallDuringABusyPoolDoesNotWait) {
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
  EXPECT_TRUE(runs_each_task_once(3));                   // would hang if it waited
  shared.leave = true;
  holder.join();
}

[[noreturn]] void exit_with_threads(const char* omp_num_threads, int32_t expected) {
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
    EXPECT_EXIT(exit_with_threads(value, expected), testing::ExitedWithCode(0), "") << value;
  }
}

// TSan does not support these tests: it ends a process with threads' child as soon as the child starts a thread.
#if !defined(__SANITIZE_THREAD__)

bool works() { return runs_each_task_once(3) && runs_each_task_once(4) && runs_each_task_once(2); }

// A data loader may fork at any time, also while another thread is inside a call.
TEST(ThreadPoolForkTest, ForkedChildAndGrandchildWorkWhileOtherThreadsUseThePool) {
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
  for (int i = 0; i < 150 && failed == 0; ++i)
    failed += !succeeds_in_child([i] { return works() && (i > 0 || succeeds_in_child(works)) && works(); });
  stop = true;
  for (std::thread& user : users) user.join();
  EXPECT_EQ(failed, 0);
}

#endif

}  // namespace
}  // namespace ngram_npu::test
