// The store between guard pages: random steps equal those of a naive model.
#include <gtest/gtest.h>

#include <cstdlib>

#include "store_episode.h"

namespace ngram_npu::test {
namespace {

uint64_t get_num_episodes() {
  const char* num_requested = std::getenv("NGRAM_NPU_STORE_EPISODES");  // `make prove` sets a larger number
#if defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kEpisodes = 40;
#else
  constexpr uint64_t kEpisodes = 200;
#endif
  return num_requested != nullptr ? std::strtoull(num_requested, nullptr, 10) : kEpisodes;
}

EventCounts run_episodes(bool corrupt) {
  EventCounts event_counts;
  for (uint64_t seed = 1; seed <= get_num_episodes(); ++seed) {
    RandomChoices choices(seed, 200);
    // Arrays end at a guard page or start after one, alternately.
    StoreEpisode episode(choices, kFlushes[seed % 2], corrupt);
    const char* error = episode.run();
    EXPECT_EQ(error, nullptr) << "seed " << seed << ": " << error;
    event_counts += episode.event_counts();
  }
  return event_counts;
}

TEST(StoreTest, RandomStepsEqualThoseOfANaiveModel) {
  for (const auto& [name, count] : run_episodes(false)) {
    EXPECT_GT(count, 0) << name;
    RecordProperty(std::string(name), std::to_string(count));
  }
}

TEST(StoreTest, CorruptMemoryCausesNoOutOfBoundsAccess) { run_episodes(true); }

}  // namespace
}  // namespace ngram_npu::test
