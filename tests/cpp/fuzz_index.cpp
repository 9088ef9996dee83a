// libFuzzer target: the bytes choose events for rows and their index; drafts must equal those of a scan (`make fuzz`).
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "cpu/instruction_set.h"
#include "index_episode.h"

namespace {

ngram_npu::test::Reached reached;

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
  static const char* const kSets[] = {"scalar", "avx2", "avx512"};
  Bytes choices(data, size);
  const int64_t kind = choices.below(12);
  if (ngram_npu_cpu_set_instruction_set(kSets[kind % 3]) != ngram_npu::kOk) return 0;
  IndexEpisode episode(choices, kFlushes[kind / 3 % 2], kind / 6 != 0);
  if (const char* wrong = episode.run()) {
    std::fprintf(stderr, "fuzz_index: %s\n", wrong);
    std::abort();
  }
  reached += episode.reached();
  return 0;
}
