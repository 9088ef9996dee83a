// Tests the store between guard pages: the scopes of drafts, the store's integrity, and the detection of corrupt words.
// This file is built twice: as released, and with so few serial numbers that the store renumbers its blocks often.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "store_episode.h"

namespace ngram_npu::test {
namespace {

using namespace store;

#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kEpisodes = 40;
#else
constexpr uint64_t kEpisodes = 300;
#endif

EventCounts run_episodes(bool corrupt) {
  EventCounts event_counts;
  for (uint64_t seed = 1; seed <= kEpisodes; ++seed) {
    RandomChoices choices(seed, 400);
    StoreEpisode episode(choices, kFlushes[seed % 2], corrupt);
    const char* error = episode.run();
    EXPECT_EQ(error, nullptr) << "seed " << seed << ": " << error;
    event_counts += episode.event_counts();
  }
  return event_counts;
}

TEST(StoreTest, DraftsHaveTextOfTheirScopeOnly) {
  for (const auto& [name, count] : run_episodes(false)) EXPECT_GT(count, 0) << name;
}

TEST(StoreTest, CorruptMemoryCausesNoOutOfBoundsAccess) { run_episodes(true); }

// Returns a store with the text of one request.
SharedStore make_store_with_text() {
  SharedStore words(1, 4, 3);
  const std::vector<int32_t> text = {5, 6, 7, 5, 6, 7, 5, 6};
  const auto length = static_cast<int32_t>(text.size());
  const std::vector<uint8_t> costs(kCostRows * kStoreCostColumns, 0);
  int32_t num_draft = 0, match_len = 0;
  NgramStoreStepParams params{};
  params.token_ids = {text.data(), 1, length, length};
  params.num_tokens = params.num_sampled = &length;
  params.batch = 1;
  params.store = words.access();
  params.draft_token_ids = {nullptr, 1, 0, 0};
  params.num_draft_tokens = &num_draft;
  params.match_len = &match_len;
  params.draft_costs = {nullptr, 1, 0, 0};
  params.costs = costs.data();
  ngram_npu_cpu_ngram_store_step_(&params, nullptr);
  return words;
}

TEST(StoreTest, ClearErasesTextAndOutcomes) {
  SharedStore words = make_store_with_text();
  cpu::Store store;
  ASSERT_TRUE(cpu::open_store(words.data(), words.count(), &store));
  const auto outcomes = reinterpret_cast<int32_t*>(store.bytes) - words.data();
  const auto has_nonzero_word_after = [&](int64_t begin) {
    return std::any_of(words.begin() + begin, words.end(), [](int32_t word) { return word != 0; });
  };
  const int64_t other_scope = 1, scope_of_text = 0;
  ngram_npu_cpu_ngram_store_clear(words.data(), words.count(), &other_scope);
  EXPECT_TRUE(has_nonzero_word_after(outcomes));
  ngram_npu_cpu_ngram_store_clear(words.data(), words.count(), &scope_of_text);
  EXPECT_FALSE(has_nonzero_word_after(reinterpret_cast<int32_t*>(store.heads) - words.data()));
}

StoreFault find_fault_after(const std::function<void(const cpu::Store&)>& corrupt) {
  SharedStore words = make_store_with_text();
  cpu::Store store;
  EXPECT_TRUE(cpu::open_store(words.data(), words.count(), &store));
  corrupt(store);
  return static_cast<StoreFault>(words.find_fault());
}

Entry* find_first_entry(const cpu::Store& store) {
  auto* entries = reinterpret_cast<Entry*>(store.lines);
  for (uint32_t i = 0; i < kLineEntries << store.line_bits; ++i) {
    if (entries[i].position != 0) return entries + i;
  }
  return nullptr;
}

TEST(StoreTest, CheckReportsFaultOfEachCorruption) {
  EXPECT_EQ(find_fault_after([](const cpu::Store&) {}), kStoreFaultNone);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.header[kHeaderMagic] = 1; }), kStoreFaultHeader);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.head(1)[kHeadFill] = 100; }), kStoreFaultSlot);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.head(1)[kHeadSerial] = 9; }), kStoreFaultBlock);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.head(1)[kHeadFirst] = 9; }), kStoreFaultFill);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.head(1)[kHeadPrevious] = 1; }), kStoreFaultLink);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) {
              s.header[kHeaderNextSerial] = 3;
              s.head(2)[kHeadSerial] = 2;
              s.head(2)[kHeadPrevious] = 1;
              s.head(2)[kHeadScope] = s.head(1)[kHeadScope] + 1;
            }),
            kStoreFaultLink);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { find_first_entry(s)->position += 200; }), kStoreFaultPlace);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { s.head(1)[kHeadSerial] = 0; }), kStoreFaultPlace);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { find_first_entry(s)->state ^= 1u << 20; }), kStoreFaultKey);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) { find_first_entry(s)->state |= 15; }), kStoreFaultCounts);
  EXPECT_EQ(find_fault_after([](const cpu::Store& s) {
              Entry* const entry = find_first_entry(s);
              const auto offset = static_cast<size_t>(entry - reinterpret_cast<Entry*>(s.lines));
              Entry* const line = entry - offset % kLineEntries;
              line[kLineEntries - 1] = *entry;
            }),
            kStoreFaultDuplicate);
}

}  // namespace
}  // namespace ngram_npu::test
