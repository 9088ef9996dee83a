// Rows on several threads: when an executor is called, with how many tasks, and that several threads give the same
// results as one. The suite runs under TSan too, so no test uses a row twice in a step, which would be the caller's
// race.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cpu/parallel.h"
#include "instruction_sets.h"
#include "lookup_cases.h"

namespace ngram_npu::test {
namespace {

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

// Runs all tasks on one thread, the last one first: an executor promises no more.
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

INSTANTIATE_TEST_SUITE_P(Isa, ThreadsTest, testing::ValuesIn(instruction_sets()), name_of_instruction_set);

// Rows of different lengths with work for several threads, and room for the sampled tokens.
struct Batch {
  static constexpr int64_t kRows = 48;
  static constexpr int64_t kCapacity = 14 * 1024;
  static constexpr int64_t kWidth = 6;
  static constexpr int64_t kDrafts = 5;

  // Lengths from half the capacity up: three quarters of 48 * 14k tokens are work for three threads.
  Batch() : tokens(static_cast<size_t>(kRows * kCapacity)), num_tokens(kRows), sampled(kRows * kWidth, -1) {
    Random random(5);
    const Tokens phrase = random.row(997, 50000);
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

  struct Results {
    Tokens tokens, num_tokens, next, num_sampled, drafts, num_draft, match_len;

    bool operator==(const Results& o) const {
      return tokens == o.tokens && num_tokens == o.num_tokens && next == o.next && num_sampled == o.num_sampled &&
             drafts == o.drafts && num_draft == o.num_draft && match_len == o.match_len;
    }
  };

  Results outputs() const {
    const Tokens batch(kRows, 77);
    return {tokens, num_tokens, batch, batch, Tokens(kRows * kDrafts, 77), batch, batch};
  }

  Results step(const Executor* executor, int32_t match_policy) const {
    Results out = outputs();
    NgramStepParams p{};
    p.token_ids = {out.tokens.data(), kRows, kCapacity, kCapacity};
    p.num_tokens = out.num_tokens.data();
    p.sampled_token_ids = {sampled.data(), kRows, kWidth, kWidth};
    p.batch = kRows;
    p.advance = true;
    p.vocab_size = 50000;
    p.lookup = {2, 5, kDrafts, int64_t{1} << 40, match_policy, true, false, nullptr, 0};
    p.next_token_ids = out.next.data();
    p.num_sampled = out.num_sampled.data();
    p.draft_token_ids = {out.drafts.data(), p.lookup.k, 4};
    p.num_draft_tokens = out.num_draft.data();
    p.match_len = out.match_len.data();
    p.executor = executor;
    EXPECT_EQ(ngram_npu_cpu_ngram_step_(&p, nullptr), kOk);
    return out;
  }

  Results propose(const Executor* executor, int32_t match_policy) const {
    Results out = outputs();
    NgramProposeParams p{};
    p.token_ids = {out.tokens.data(), kRows, kCapacity, kCapacity};
    p.num_tokens = out.num_tokens.data();
    p.batch = kRows;
    p.lookup = {2, 5, kDrafts, int64_t{1} << 40, match_policy, true, false, nullptr, 0};
    p.draft_token_ids = {out.drafts.data(), p.lookup.k, 4};
    p.num_draft_tokens = out.num_draft.data();
    p.match_len = out.match_len.data();
    p.executor = executor;
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
    return out;
  }

  Tokens tokens;
  Tokens num_tokens;
  Tokens sampled;
};

const Batch& batch() {
  static const Batch made;
  return made;
}

TEST_P(ThreadsTest, SeveralThreadsGiveWhatOneGives) {
  const Executor backwards{run_backwards, 3, kTokensPerThread, nullptr};
  for (const int32_t match_policy : {kEarliest, kLatest}) {
    const Batch::Results stepped = batch().step(nullptr, match_policy);
    const Batch::Results proposed = batch().propose(nullptr, match_policy);
    int64_t drafted = 0;
    for (const int32_t count : stepped.num_draft) drafted += count > 0;
    EXPECT_GT(drafted, Batch::kRows / 2);  // or the comparison would show little
    ThreadExecutor threads(4);
    EXPECT_TRUE(batch().step(threads.get(), match_policy) == stepped);
    EXPECT_EQ(threads.tasks(), 3);
    EXPECT_TRUE(batch().propose(threads.get(), match_policy) == proposed);
    EXPECT_EQ(threads.calls(), 2);
    EXPECT_TRUE(batch().step(&backwards, match_policy) == stepped);
  }
}

TEST_P(ThreadsTest, TheCallerLimitsTheThreads) {
  ThreadExecutor two(2);
  batch().propose(two.get(), kEarliest);
  EXPECT_EQ(two.tasks(), 2);  // the executor's limit

  ThreadExecutor many(64);
  batch().propose(many.get(), kEarliest);
  EXPECT_EQ(many.tasks(), 3);  // enough work for three

  ThreadExecutor eager(64, kTokensPerThread / 4);
  batch().propose(eager.get(), kEarliest);
  EXPECT_EQ(eager.tasks(), 15);  // this executor needs less work per thread

  ngram_npu_cpu_set_num_threads(2);
  EXPECT_EQ(ngram_npu_cpu_num_threads(), 2);
  batch().propose(many.get(), kEarliest);
  EXPECT_EQ(many.tasks(), 2);  // the caller's limit

  ngram_npu_cpu_set_num_threads(1);
  const int32_t calls = many.calls();
  batch().propose(many.get(), kEarliest);
  EXPECT_EQ(many.calls(), calls);  // one thread needs no executor

  ngram_npu_cpu_set_num_threads(-5);  // no limit
  EXPECT_EQ(ngram_npu_cpu_num_threads(), 0);
  batch().propose(many.get(), kEarliest);
  EXPECT_EQ(many.tasks(), 3);
}

// Calls that read the same rows at once, each with an executor of its own.
TEST_P(ThreadsTest, CallsAtOnce) {
  const Batch::Results alone = batch().propose(nullptr, kEarliest);
  std::atomic<int32_t> equal{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      const ThreadExecutor threads(2);
      equal += batch().propose(threads.get(), kEarliest) == alone;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(equal.load(), 3);
}

// The work is the number of tokens that a pass reads: threads are used from the crossover on, never for invalid lengths
// or rows, and never more threads than rows.
TEST_P(ThreadsTest, WorkBelowTheCrossoverStaysOnTheCaller) {
  const Tokens row(static_cast<size_t>(2 * kTokensPerThread), 7);
  const auto tasks_for = [&](const std::vector<int32_t>& lengths, const std::vector<int64_t>& indices) {
    const auto n = static_cast<int64_t>(indices.size());
    Tokens drafts(indices.size()), num_draft(indices.size()), match_len(indices.size());
    ThreadExecutor threads(8);
    NgramProposeParams p{};
    // All rows are the same memory, which threads may read at the same time.
    p.token_ids = {row.data(), static_cast<int64_t>(lengths.size()), static_cast<int64_t>(row.size()), 0};
    p.num_tokens = lengths.data();
    p.row_indices = {indices.data(), 8};
    p.batch = n;
    p.lookup = {1, 1, 1, int64_t{1} << 40, kEarliest, false, false, nullptr, 0};
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
}  // namespace ngram_npu::test
