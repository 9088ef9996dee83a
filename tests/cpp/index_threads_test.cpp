// Appending with threads: the index drafts the same as one built by one thread, with enough memory and with too little.
// Runs under TSan too.
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
#include "cpu/ngram_index.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const ngram_npu::NgramIndexResetParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const ngram_npu::NgramIndexStepParams* params, void*);

namespace ngram_npu::test {
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
}  // namespace ngram_npu::test
