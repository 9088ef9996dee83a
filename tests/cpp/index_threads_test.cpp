// Appending over threads: the index drafts what one thread's does, with memory enough and without. Runs under TSan too.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "core/ngram_index_append_.h"
#include "core/ngram_index_step_.h"
#include "cpu/ngram_index.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const ngram_npu::NgramIndexAppendParams* params, void*);
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

// The drafts of a few steps after one append.
Tokens drafts_after(const Executor* executor, const Tokens& tokens, int64_t pages, int32_t match) {
  Tokens buffer = tokens, lengths(kRows, kCapacity - 100), all;
  const int64_t words = ngram_npu_cpu_ngram_index_words(kRows, pages);
  Tokens index(static_cast<size_t>(words), 0);
  EXPECT_EQ(ngram_npu_cpu_ngram_index_init(index.data(), words, kRows), kOk);
  const NgramIndexAppendParams append{{buffer.data(), kRows, kCapacity, kCapacity},
                                      lengths.data(),
                                      {},
                                      {},
                                      kRows,
                                      2,
                                      4,
                                      match,
                                      index.data(),
                                      words,
                                      executor};
  EXPECT_EQ(ngram_npu_cpu_ngram_index_append_(&append, nullptr), kOk);
  int64_t where = 0;
  EXPECT_EQ(ngram_npu_cpu_ngram_index_check(index.data(), words, &where), 0);
  const Tokens batch(kRows);
  Tokens next = batch, num_sampled = batch, num_draft = batch, match_len = batch, drafts(kRows * kDrafts);
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
    p.step.lookup = {2, 4, kDrafts, int64_t{1} << 40, match, false};
    p.step.next_token_ids = next.data();
    p.step.num_sampled = num_sampled.data();
    p.step.draft_token_ids = drafts.data();
    p.step.num_draft_tokens = num_draft.data();
    p.step.match_len = match_len.data();
    p.index = index.data();
    p.index_words = words;
    p.catch_up_tokens = -1;
    EXPECT_EQ(ngram_npu_cpu_ngram_index_step_(&p, nullptr), kOk);
    all.insert(all.end(), drafts.begin(), drafts.end());
  }
  return all;
}

TEST(IndexThreadsTest, SeveralThreadsBuildWhatOneBuilds) {
  std::mt19937 random(3);
  const Executor executor{run_threads, 4, 1000, nullptr};
  for (const int32_t alphabet : {40, 3000}) {
    Tokens tokens(kRows * kCapacity);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(alphabet));
    for (const int32_t match : {kEarliest, kLatest}) {
      for (const int64_t pages : {int64_t{1000}, int64_t{60}}) {  // the second are too few
        tasks_seen = 0;
        EXPECT_EQ(drafts_after(&executor, tokens, pages, match), drafts_after(nullptr, tokens, pages, match));
        EXPECT_EQ(tasks_seen, 4);
      }
    }
  }
}

}  // namespace
}  // namespace ngram_npu::test
