// libFuzzer targets (`make fuzz`): the bytes choose the events of an episode, which compares results with definitions.
<<<<<<< HEAD
//   fuzz_device_store   requests that share a device store; contents and drafts must equal those of a naive model
=======
//   fuzz_index   rows with an index; drafts must equal those of a scan
//   fuzz_store   requests that share a store; contents and drafts must equal those of a naive model
>>>>>>> h/store
#include <cstdio>
#include <cstdlib>

#include "choices.h"
<<<<<<< HEAD
#include "device_store_episode.h"
=======
#if defined(FUZZ_STORE)
#include "store_episode.h"
#else
#include "cpu/machine.h"
#include "index_episode.h"
#endif
>>>>>>> h/store

namespace ngram_npu::test {
namespace {

EventCounts event_counts;

template <class Episode>
int run_episode(Episode&& episode) {
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

// Prints the counts at the process's end. tools/fuzz.py reads these lines and fails if a count is 0.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit([] {
    for (const auto& [name, count] : event_counts) {
      std::fprintf(stderr, "reached %s: %lld\n", name.data(), static_cast<long long>(count));
    }
  });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ByteChoices choices(data, size);
<<<<<<< HEAD
  const int64_t variant = choices.below(4);
  return run_episode(DeviceStoreEpisode(choices, kFlushes[variant % 2], variant / 2 != 0));
=======
#if defined(FUZZ_STORE)
  const int64_t variant = choices.below(4);
  return run_episode(StoreEpisode(choices, kFlushes[variant % 2], variant / 2 != 0));
#else
  static const char* const kInstructionSets[] = {"scalar", "avx2", "avx512"};
  const int64_t variant = choices.below(12);
  if (ngram_npu_cpu_set_instruction_set(kInstructionSets[variant % 3]) != ngram_npu::kOk) return 0;
  return run_episode(IndexEpisode(choices, kFlushes[variant / 3 % 2], variant / 6 != 0));
#endif
>>>>>>> h/store
}
