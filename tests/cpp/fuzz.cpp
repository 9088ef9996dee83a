// A libFuzzer target (`make test-sanitizers`): the bytes choose the events of an episode of requests that share a
// store. The contents and drafts must equal those of a naive model.
#include <cstdio>
#include <cstdlib>

#include "choices.h"
#include "store_episode.h"

using namespace ngram_npu::test;

static EventCounts event_counts;

// Checks at the process's end that each event occurred, such as a replaced block. If one did not, the run did not test
// drafting across it, and fails.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit([] {
    bool has_all_events = !event_counts.empty();
    for (const auto& [name, count] : event_counts) {
      std::fprintf(stderr, "reached %s: %lld\n", name.data(), static_cast<long long>(count));
      has_all_events = has_all_events && count > 0;
    }
    if (!has_all_events) {
      std::fprintf(stderr, "fuzz: an event was never reached\n");
      std::_Exit(1);
    }
  });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ByteChoices choices(data, size);
  const int64_t variant = choices.below(4);
  StoreEpisode episode(choices, kFlushes[variant % 2], variant / 2 != 0);
  if (const char* error = episode.run()) {
    std::fprintf(stderr, "fuzz: %s\n", error);
    std::abort();
  }
  event_counts += episode.event_counts();
  return 0;
}
