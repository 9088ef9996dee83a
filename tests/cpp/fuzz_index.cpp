// libFuzzer's target: what the bytes choose happens to rows and their index, drafts must be the rescan's (`make fuzz`).
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "cpu/instruction_set.h"
#include "index_episode.h"

namespace {

class Bytes : public ngram_npu::test::Choices {
 public:
  Bytes(const uint8_t* at, size_t size) : at_(at), end_(at + size) {}
  // A choice among few takes one byte; behind the end all choices are 0.
  int64_t below(int64_t n) override {
    uint64_t value = 0;
    for (int64_t range = 1; range < n && at_ < end_; range <<= 8) value = value << 8 | *at_++;
    return static_cast<int64_t>(value % static_cast<uint64_t>(n));
  }
  bool more() override { return at_ < end_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

ngram_npu::test::Reached reached;

}  // namespace

// tools/verify/fuzz.py reads the lines, and fails where one of them says 0.
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
