// libFuzzer target: the bytes choose events for rows and their index; drafts must equal those of a scan (`make fuzz`).
#include "cpu/instruction_set.h"
#include "fuzz.h"
#include "index_episode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ngram_npu::test;
  static const char* const kSets[] = {"scalar", "avx2", "avx512"};
  Bytes choices(data, size);
  const int64_t kind = choices.below(12);
  if (ngram_npu_cpu_set_instruction_set(kSets[kind % 3]) != ngram_npu::kOk) return 0;
  return run(IndexEpisode(choices, kFlushes[kind / 3 % 2], kind / 6 != 0));
}
