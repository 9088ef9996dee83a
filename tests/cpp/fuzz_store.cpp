// libFuzzer target: the bytes choose events for requests that share a store; no scope may see another's text
// (`make fuzz`).
#include <cstdio>
#include <cstdlib>

#include "store_episode.h"

namespace {

ngram_npu::test::StoreReached reached;

}  // namespace

// tools/verify/fuzz.py reads these lines and fails if a count is 0.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit([] {
    for (const auto& [name, at] : reached.kNames) {
      std::fprintf(stderr, "reached %s: %lld\n", name, static_cast<long long>(reached.*at));
    }
  });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ngram_npu::test;
  Bytes choices(data, size);
  const int64_t kind = choices.below(4);
  StoreEpisode episode(choices, kFlushes[kind % 2], kind / 2 != 0);
  if (const char* wrong = episode.run()) {
    std::fprintf(stderr, "fuzz_store: %s\n", wrong);
    std::abort();
  }
  reached += episode.reached();
  return 0;
}
