// The two entries of drafting on the host, compared with the operators: drafts of a lookup and then of a store, and
// text inserted later, with budgets that do not index all rows.
#include <gtest/gtest.h>

#include <vector>

#include "choices.h"
#include "core/ngram_index_layout.h"
#include "cpu/host_drafting.h"
#include "entry_points.h"

namespace ngram_npu::test {
namespace {

constexpr int64_t kRows = 3, kCapacity = 1500, kDrafts = 6, kPages = 60, kBlocks = 16, kLineBits = 6;
constexpr int64_t kStride = kDrafts + 2;

struct Kept {
  Index index{kRows, kPages};
  SharedStore store{kRows, kBlocks, kLineBits};
};

struct Drafts {
  std::vector<int32_t> counts = std::vector<int32_t>(kRows), lengths = std::vector<int32_t>(kRows);
  std::vector<uint8_t> costs = std::vector<uint8_t>(kRows * kDrafts);
};

TEST(DraftingTest, EqualsTheSequenceOfTheOperators) {
  int64_t from_store = 0, scanned = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    RandomChoices c(seed, 60);
    Kept kept, other;
    std::vector<int32_t> tokens(kRows * kCapacity), num_tokens(kRows), num_sampled(kRows);
    std::vector<uint8_t> costs(kCostRows * kCostColumns), store_costs(kCostRows * store::kStoreCostColumns);
    for (auto* table : {&costs, &store_costs}) {
      for (uint8_t& cost : *table) cost = static_cast<uint8_t>(c.below(30));
    }
    const std::vector<int64_t> scopes = {c.below(2), c.below(2), 0};
    NgramIndexProposeParams lookup{};
    NgramProposeParams& p = lookup.propose;
    p.token_ids = {tokens.data(), kRows, kCapacity, kCapacity};
    p.num_tokens = num_tokens.data();
    p.num_sampled = num_sampled.data();
    p.batch = kRows;
    p.lookup = {1,           kLadderMaxN, kDrafts, c.one_in(2) ? kCapacity / 2 : kCapacity, kLatest, c.one_in(2),
                c.one_in(2), nullptr,     0};
    lookup.ladder = {true, costs.data(), 40};
    const auto into = [&](Drafts& drafts) {
      p.num_draft_tokens = drafts.counts.data();
      p.match_len = drafts.lengths.data();
      p.draft_costs = {drafts.costs.data(), kDrafts};
    };
    while (c.more()) {
      for (int64_t r = 0; r < kRows; ++r) {
        const auto row = static_cast<size_t>(r);
        const int64_t most = kCapacity - num_tokens[row];
        const int64_t prompt = c.one_in(20) ? c.below(300) : 0;
        num_sampled[row] = static_cast<int32_t>(smaller(c.below(4), most));
        const int64_t grows = smaller(prompt + num_sampled[row], most);
        for (int64_t j = 0; j < grows; ++j)
          tokens[row * kCapacity + static_cast<size_t>(num_tokens[row]++)] = static_cast<int32_t>(c.below(3));
      }
      Drafts want, got;
      std::vector<int32_t> ids(kRows * kDrafts);
      std::vector<int64_t> wide(kRows * kStride, -7);
      into(want);
      p.draft_token_ids = {ids.data(), kDrafts, 4};
      lookup.index = kept.index.access();
      lookup.catch_up_tokens = -1;
      ASSERT_EQ(ngram_npu_cpu_ngram_index_propose_(&lookup, nullptr), kOk);
      NgramStoreStepParams step{};
      step.token_ids = p.token_ids;
      step.num_tokens = p.num_tokens;
      step.num_sampled = p.num_sampled;
      step.scopes = {scopes.data(), 8};
      step.batch = kRows;
      step.store = kept.store.access();
      step.draft_token_ids = {ids.data(), kRows, kDrafts, kDrafts};
      step.num_draft_tokens = want.counts.data();
      step.match_len = want.lengths.data();
      step.draft_costs = {want.costs.data(), kRows, kDrafts, kDrafts};
      step.max_len = p.lookup.max_len;
      step.costs = store_costs.data();
      step.cost_limit = 40;
      step.fill = p.lookup.fill;
      const std::vector<int32_t> lookup_ids = ids;
      ASSERT_EQ(ngram_npu_cpu_ngram_store_step_(&step, nullptr), kOk);
      from_store += ids != lookup_ids;

      into(got);
      p.draft_token_ids = {wide.data() + 1, kStride, 8};
      lookup.index = other.index.access();
      lookup.catch_up_tokens = c.below(20);
      const StoreLookup asked{other.store.access(), {scopes.data(), 8}, store_costs.data(), 40};
      const DraftParams draft{lookup, asked};
      ASSERT_EQ(ngram_npu_cpu_draft(&draft), kOk);
      NgramIndexAppendParams rows{};
      rows.token_ids = p.token_ids;
      rows.num_tokens = p.num_tokens;
      rows.batch = kRows;
      rows.min_n = 1;
      rows.max_n = kLadderMaxN;
      rows.match_policy = kLatest;
      rows.ladder = rows.outcomes = true;
      rows.index = other.index.access();
      const InsertParams inserted{
          rows,
          c.below(30),
          {other.store.access(), p.token_ids, p.num_tokens, p.num_sampled, {}, {}, {scopes.data(), 8}, kRows}};
      ASSERT_EQ(ngram_npu_cpu_insert_tokens(&inserted), kOk);

      std::vector<int64_t> expected(kRows * kStride, -7);
      for (size_t i = 0; i < ids.size(); ++i) expected[i / kDrafts * kStride + 1 + i % kDrafts] = ids[i];
      ASSERT_EQ(wide, expected) << "seed " << seed;
      ASSERT_EQ(got.counts, want.counts) << "seed " << seed;
      ASSERT_EQ(got.lengths, want.lengths) << "seed " << seed;
      ASSERT_EQ(got.costs, want.costs) << "seed " << seed;
      ASSERT_EQ(other.store, kept.store) << "seed " << seed;
      ASSERT_EQ(other.index.fault(), 0);
    }
    scanned += other.index[index::kStatScanCatchUp];
  }
  EXPECT_GT(from_store, 50);
  EXPECT_GT(scanned, 50);
}

}  // namespace
}  // namespace ngram_npu::test
