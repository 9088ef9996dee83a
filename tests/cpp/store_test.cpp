// The store between guard pages: scopes of drafts, integrity, and detection of damage. Built twice: as released, and
// with so few serial numbers that it is emptied again and again.
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

EventCounts run(bool corrupt) {
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
  for (const auto& [name, count] : run(false)) EXPECT_GT(count, 0) << name;
}

TEST(StoreTest, CorruptMemoryCausesNoOutOfBoundsAccess) { run(true); }

// Returns a store with the text of one request.
SharedStore make_store_with_text() {
  SharedStore words(1, 4, 3);
  const std::vector<int32_t> text = {5, 6, 7, 5, 6, 7, 5, 6};
  const auto length = static_cast<int32_t>(text.size());
  const std::vector<uint8_t> costs(kCostRows * kStoreCostColumns, 0);
  int32_t count = 0, match = 0;
  NgramStoreStepParams p{};
  p.token_ids = {text.data(), 1, length, length};
  p.num_tokens = p.num_sampled = &length;
  p.batch = 1;
  p.store = words.access();
  p.draft_token_ids = {nullptr, 1, 0, 0};
  p.num_draft_tokens = &count;
  p.match_len = &match;
  p.draft_costs = {nullptr, 1, 0, 0};
  p.costs = costs.data();
  ngram_npu_cpu_ngram_store_step_(&p, nullptr);
  return words;
}

TEST(StoreTest, ClearErasesTextAndOutcomes) {
  SharedStore words = make_store_with_text();
  cpu::Store store;
  ASSERT_TRUE(cpu::open_store(words.data(), words.count(), &store));
  const auto outcomes = reinterpret_cast<int32_t*>(store.bytes) - words.data();
  const auto any_from = [&](int64_t begin) {
    return std::any_of(words.begin() + begin, words.end(), [](int32_t word) { return word != 0; });
  };
  const int64_t other = 1, own = 0;
  ngram_npu_cpu_ngram_store_clear(words.data(), words.count(), &other);
  EXPECT_TRUE(any_from(outcomes));
  ngram_npu_cpu_ngram_store_clear(words.data(), words.count(), &own);
  EXPECT_FALSE(any_from(reinterpret_cast<int32_t*>(store.heads) - words.data()));
}

StoreFault find_fault_after(const std::function<void(const cpu::Store&)>& corrupt) {
  SharedStore words = make_store_with_text();
  cpu::Store store;
  EXPECT_TRUE(cpu::open_store(words.data(), words.count(), &store));
  corrupt(store);
  return static_cast<StoreFault>(words.fault());
}

Entry* find_first_entry(const cpu::Store& store) {
  auto* entries = reinterpret_cast<Entry*>(store.lines);
  for (uint32_t i = 0; i < kLineEntries << store.line_bits; ++i) {
    if (entries[i].position != 0) return entries + i;
  }
  return nullptr;
}

TEST(StoreTest, CheckReportsTheKindOfCorruption) {
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
