// libFuzzer targets (`make fuzz`): the bytes choose the events of an episode, which compares results with definitions.
//   fuzz_index   rows and their index: drafts must equal those of a scan
//   fuzz_store   requests that share a store: no scope may see another's text
//   fuzz_device_store   requests that share a device store: its contents and drafts must equal those of a naive model
#include <cstdio>
#include <cstdlib>

#include "choices.h"
#if defined(FUZZ_STORE)
#include "store_episode.h"
#elif defined(FUZZ_DEVICE_STORE)
#include "device_store_episode.h"
#else
#include "cpu/machine.h"
#include "index_episode.h"
#endif

namespace ngram_npu::test {
namespace {

EventCounts event_counts;

template <class Episode>
int run(Episode&& episode) {
  if (const char* error = episode.run()) {
    std::fprintf(stderr, "fuzz: %s\n", error);
    std::abort();
  }
  event_counts += episode.event_counts();
  return 0;
}

}  // namespace
}  // namespace ngram_npu::test

using namespace ngram_npu::test;

// tools/fuzz.py reads these lines and fails if a count is 0.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit([] {
    for (const auto& [name, count] : event_counts) {
      std::fprintf(stderr, "reached %s: %lld\n", name.data(), static_cast<long long>(count));
    }
  });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes choices(data, size);
#if defined(FUZZ_STORE)
  const int64_t kind = choices.below(4);
  return run(StoreEpisode(choices, kFlushes[kind % 2], kind / 2 != 0));
#elif defined(FUZZ_DEVICE_STORE)
  const int64_t kind = choices.below(4);
  return run(DeviceStoreEpisode(choices, kFlushes[kind % 2], kind / 2 != 0));
#else
  static const char* const kSets[] = {"scalar", "avx2", "avx512"};
  const int64_t kind = choices.below(12);
  if (ngram_npu_cpu_set_instruction_set(kSets[kind % 3]) != ngram_npu::kOk) return 0;
  return run(IndexEpisode(choices, kFlushes[kind / 3 % 2], kind / 6 != 0));
#endif
}
