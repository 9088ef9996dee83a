// What the libFuzzer targets share.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "choices.h"

inline ngram_npu::test::Reached reached;

// tools/fuzz.py reads these lines and fails if a count is 0.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit([] {
    for (const auto& [name, count] : reached) {
      std::fprintf(stderr, "reached %s: %lld\n", name.data(), static_cast<long long>(count));
    }
  });
  return 0;
}

template <class Episode>
int run(Episode&& episode) {
  if (const char* wrong = episode.run()) {
    std::fprintf(stderr, "fuzz: %s\n", wrong);
    std::abort();
  }
  reached += episode.reached();
  return 0;
}
