// libFuzzer target: the bytes choose events for requests that share a store; no scope may see another's text
// (`make fuzz`).
#include "fuzz.h"
#include "store_episode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ngram_npu::test;
  Bytes choices(data, size);
  const int64_t kind = choices.below(4);
  return run(StoreEpisode(choices, kFlushes[kind % 2], kind / 2 != 0));
}
