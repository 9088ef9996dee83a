// Calls with several threads. This suite runs under TSan too.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "core/drafting.h"
#include "core/ngram_index_layout.h"
#include "core/store.h"
#include "cpu/ngram_index.h"
#include "cpu/ngram_store.h"
#include "cpu/parallel.h"
#include "instruction_sets.h"
#include "lookup_cases.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const ngram_npu::NgramIndexResetParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const ngram_npu::NgramIndexStepParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const ngram_npu::NgramStoreStepParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_finish_(const ngram_npu::NgramStoreFinishParams* params, void*);

namespace ngram_npu::test {

// The scan: when an executor is called, with how many tasks, and that several threads give the same results as one. No
// test uses a row twice in a step, which would be the caller's race.
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

// Appending to an index: it drafts the same as one built by one thread, with enough memory and with too little.
namespace {

using Tokens = std::vector<int32_t>;

int32_t tasks_seen = 0;

void run_threads(const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
  tasks_seen = num_tasks;
  std::vector<std::thread> threads;
  for (int32_t task = 0; task < num_tasks; ++task) threads.emplace_back(fn, context, task);
  for (std::thread& thread : threads) thread.join();
}

constexpr int64_t kRows = 12, kCapacity = 6000, kDrafts = 4, kWidth = 3;

struct Lookup {
  LookupOptions options;
  bool ladder;
  const uint8_t* costs;
};

// The drafts of a few steps after one append, and what they cost.
Tokens drafts_after(const Executor* executor, const Tokens& tokens, int64_t pages, const Lookup& lookup) {
  Tokens buffer = tokens, lengths(kRows, kCapacity - 100), all;
  const int64_t words = ngram_npu_cpu_ngram_index_words(kRows, pages);
  Tokens index(static_cast<size_t>(words), 0);
  EXPECT_EQ(ngram_npu_cpu_ngram_index_init(index.data(), words, kRows), kOk);
  const NgramIndexAppendParams append{{buffer.data(), kRows, kCapacity, kCapacity},
                                      lengths.data(),
                                      {},
                                      kRows,
                                      lookup.options.min_n,
                                      lookup.options.max_n,
                                      lookup.options.match_policy,
                                      lookup.ladder,
                                      lookup.costs != nullptr,
                                      {index.data(), words, {}},
                                      executor};
  EXPECT_EQ(ngram_npu_cpu_ngram_index_append_(&append, nullptr), kOk);
  int64_t where = 0;
  EXPECT_EQ(ngram_npu_cpu_ngram_index_check(index.data(), words, &where), 0);
  const Tokens batch(kRows);
  Tokens next = batch, num_sampled = batch, num_draft = batch, match_len = batch, drafts(kRows * kDrafts);
  std::vector<uint8_t> paid(kRows * kDrafts);
  for (int64_t step = 0; step < 5; ++step) {
    Tokens sampled(kRows * kWidth);
    for (size_t i = 0; i < sampled.size(); ++i) sampled[i] = tokens[i * 77 + static_cast<size_t>(step) * 1001];
    NgramIndexStepParams p{};
    p.step.token_ids = {buffer.data(), kRows, kCapacity, kCapacity};
    p.step.num_tokens = lengths.data();
    p.step.sampled_token_ids = {sampled.data(), kRows, kWidth, kWidth};
    p.step.batch = kRows;
    p.step.advance = true;
    p.step.vocab_size = 1 << 30;
    p.step.lookup = lookup.options;
    p.step.next_token_ids = next.data();
    p.step.num_sampled = num_sampled.data();
    p.step.draft_token_ids = {drafts.data(), p.step.lookup.k, 4};
    p.step.num_draft_tokens = num_draft.data();
    p.step.match_len = match_len.data();
    p.index = {index.data(), words, {}};
    p.catch_up_tokens = -1;
    p.ladder = {lookup.ladder, lookup.costs, 40};
    if (lookup.costs != nullptr) p.step.draft_costs = {paid.data(), kDrafts};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_step_(&p, nullptr), kOk);
    all.insert(all.end(), drafts.begin(), drafts.end());
    all.insert(all.end(), paid.begin(), paid.end());
  }
  return all;
}

TEST(IndexThreadsTest, SeveralThreadsBuildWhatOneBuilds) {
  std::mt19937 random(3);
  const Executor executor{run_threads, 4, 1000, nullptr};
  std::vector<uint8_t> costs(kCostRows * kCostColumns);
  for (uint8_t& cost : costs) cost = static_cast<uint8_t>(random() % 40);
  const auto options = [](int64_t min_n, int64_t max_n, int32_t match_policy) {
    return LookupOptions{min_n, max_n, kDrafts, int64_t{1} << 40, match_policy, false, false, nullptr, 0};
  };
  const LookupOptions sizes = options(1, kLadderMaxN, kLatest);
  const Lookup lookups[] = {{options(2, 4, kEarliest), false, nullptr},
                            {options(2, 4, kLatest), false, nullptr},
                            {sizes, true, nullptr},
                            {sizes, true, costs.data()}};
  for (const int32_t alphabet : {40, 3000}) {
    Tokens tokens(kRows * kCapacity);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(alphabet));
    for (const Lookup& lookup : lookups) {
      for (const int64_t pages : {int64_t{1000}, int64_t{60}}) {  // 60 are too few
        // The threads decide which rows find no room; those rows have no outcomes.
        if (pages == 60 && lookup.costs != nullptr) continue;
        tasks_seen = 0;
        EXPECT_EQ(drafts_after(&executor, tokens, pages, lookup), drafts_after(nullptr, tokens, pages, lookup));
        EXPECT_EQ(tasks_seen, 4);
      }
    }
  }
}

// Rows and an index of them, for appends with given slots.
class Indexed {
 public:
  explicit Indexed(int64_t pages)
      : pages_(pages),
        tokens_(kRows * kCapacity),
        lengths_(kRows, kCapacity),
        words_(static_cast<size_t>(ngram_npu_cpu_ngram_index_words(kRows, pages))) {
    std::mt19937 random(5);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random() % 300);
    EXPECT_EQ(ngram_npu_cpu_ngram_index_init(words_.data(), size(), kRows), kOk);
  }

  int64_t size() const { return static_cast<int64_t>(words_.size()); }

  void append(const Executor* executor, const Tokens& slots) {
    const NgramIndexAppendParams params{{tokens_.data(), kRows, kCapacity, kCapacity},
                                        lengths_.data(),
                                        {},
                                        static_cast<int64_t>(slots.size()),
                                        2,
                                        4,
                                        kEarliest,
                                        false,
                                        false,
                                        {words_.data(), size(), {slots.data(), 4}},
                                        executor};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_append_(&params, nullptr), kOk);
  }

  void reset(const Tokens& slots) {
    const NgramIndexResetParams params{{words_.data(), size(), {slots.data(), 4}}, static_cast<int64_t>(slots.size())};
    EXPECT_EQ(ngram_npu_cpu_ngram_index_reset_(&params, nullptr), kOk);
  }

  // A slot whose state claims the largest directory, all of it in page 0, which has no owner: resetting it is slow.
  void make_large(int64_t slot) {
    int32_t* state = words_.data() + index::kHeaderWords + slot * index::kSlotWords;
    state[index::kSlotPages] = 1;
    state[index::kSlotDepth] = index::kMaxDepth;
    std::fill_n(words_.end() - pages_ * index::kPageWords, index::kPageWords, static_cast<int32_t>(index::kMaxDepth));
  }

  // The whole, and one slot against one row.
  bool is_sound(int64_t slot, int64_t row) {
    int64_t where = 0;
    return ngram_npu_cpu_ngram_index_check(words_.data(), size(), &where) == 0 &&
           ngram_npu_cpu_ngram_index_check_row(words_.data(), size(), slot, tokens_.data() + row * kCapacity,
                                               kCapacity) == 0;
  }

 private:
  const int64_t pages_;
  Tokens tokens_, lengths_, words_;
};

TEST(IndexThreadsTest, ASlotNamedTwiceIsLeftToOneThread) {
  const Executor executor{run_threads, 4, 1000, nullptr};
  Indexed indexed(1000);
  tasks_seen = 0;
  indexed.append(&executor, {3, 3, 5, 3, -1, -1, 99});
  EXPECT_EQ(tasks_seen, 0);
  EXPECT_TRUE(indexed.is_sound(3, 3));
  EXPECT_TRUE(indexed.is_sound(5, 2));
  indexed.append(&executor, {3, 4, 5, 6, -1, -1, 99});
  EXPECT_EQ(tasks_seen, 4);
  EXPECT_TRUE(indexed.is_sound(6, 3));
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support forking a process with threads

TEST(IndexThreadsTest, AChildIndexesThoughItsParentDidAtTheFork) {
  Indexed mine(10), its(200);
  std::atomic<bool> stop{false};
  std::thread user([&] {  // nearly always holds pages, never memory from malloc
    const Tokens slot = {0};
    while (!stop) {
      mine.make_large(0);
      mine.reset(slot);
    }
  });
  int failed = 0;
  const Tokens one = {7};
  for (int i = 0; i < 5 && failed == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      its.append(nullptr, one);
      _exit(its.is_sound(7, 0) ? 0 : 1);
    }
    int status = -1;
    failed += !(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  user.join();
  EXPECT_EQ(failed, 0);
}

#endif

}  // namespace

// Concurrent calls on one store: one of them uses it, the others skip it.
namespace {

constexpr int64_t kThreads = 4, kBits = 6;

// Steps of one request that counts up and starts over, in a slot of its own.
void use(int32_t* words, int64_t size, int64_t slot) {
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
    p.store = {words, size};
    p.draft_token_ids = {drafts.data(), 1, kDrafts, kDrafts};
    p.num_draft_tokens = &count;
    p.match_len = &match;
    p.draft_costs = {paid.data(), 1, kDrafts, kDrafts};
    p.max_len = 1 << 20;
    p.costs = costs.data();
    p.cost_limit = 40;
    ngram_npu_cpu_ngram_store_step_(&p, nullptr);
  }
  const NgramStoreFinishParams finish{{words, size}, {&slot, 8}, 1};
  ngram_npu_cpu_ngram_store_finish_(&finish, nullptr);
}

TEST(StoreThreadsTest, CallsThatMeetDoNoHarm) {
  int64_t parts[6];
  ngram_npu_cpu_ngram_store_parts(kThreads, 5 * kThreads, kBits, parts);
  std::vector<int32_t> words(static_cast<size_t>(parts[5]), 0);
  ngram_npu_cpu_ngram_store_init(words.data(), parts[5], kThreads, 5 * kThreads, kBits, store::kLive);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) threads.emplace_back(use, words.data(), parts[5], i);
  for (std::thread& thread : threads) thread.join();
  int64_t where = 0;
  EXPECT_EQ(ngram_npu_cpu_ngram_store_check(words.data(), parts[5], &where), 0);
  // Each call used the store or was counted.
  const auto* header = reinterpret_cast<const uint32_t*>(words.data());
  EXPECT_EQ(header[store::kHeaderBusy], 0u);
  EXPECT_GT(header[store::kStatEntered], 0u);
  EXPECT_LE(header[store::kStatLookups] + header[store::kStatBusy], 199u * kThreads + kThreads);
  EXPECT_GE(header[store::kStatLookups] + header[store::kStatBusy], 199u * kThreads);
}

TEST(StoreThreadsTest, WhoeverFindsTheStoreTakenGoesWithout) {
  int64_t parts[6];
  ngram_npu_cpu_ngram_store_parts(1, 4, kBits, parts);
  std::vector<int32_t> words(static_cast<size_t>(parts[5]), 0);
  ngram_npu_cpu_ngram_store_init(words.data(), parts[5], 1, 4, kBits, store::kLive);
  ASSERT_TRUE(ngram_npu_cpu_ngram_store_take(words.data(), parts[5]));
  EXPECT_FALSE(ngram_npu_cpu_ngram_store_take(words.data(), parts[5]));
  use(words.data(), parts[5], 0);
  const auto* header = reinterpret_cast<const uint32_t*>(words.data());
  EXPECT_EQ(header[store::kStatEntered], 0u);
  EXPECT_EQ(header[store::kStatBusy], 200u);
  ngram_npu_cpu_ngram_store_give_back(words.data(), parts[5]);
  use(words.data(), parts[5], 0);
  EXPECT_GT(header[store::kStatEntered], 0u);
}

}  // namespace
}  // namespace ngram_npu::test
