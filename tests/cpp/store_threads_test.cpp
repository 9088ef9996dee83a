// Concurrent calls on one store: one of them uses it, the others skip it. Runs under TSan too.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/store.h"
#include "cpu/ngram_store.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const ngram_npu::NgramStoreStepParams* params, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_finish_(const ngram_npu::NgramStoreFinishParams* params, void*);

namespace ngram_npu::test {
namespace {

constexpr int64_t kThreads = 4, kBits = 6;

// Steps of one request that counts up and starts over, in a slot of its own.
void use(int32_t* words, int64_t size, int64_t slot) {
  constexpr int64_t kDrafts = 4;
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
