// A launch on the twin: its blocks run in shuffled order on threads, one simulated core each.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core.h"

namespace ngram_npu::twin {

struct Outcome {
  std::string fault;        // empty: no fault
  std::vector<Cost> costs;  // per block
  uint64_t same_line = 0;   // the most copies that cores made at one 512-byte line of global memory
};

struct Options {
  uint64_t seed = 0;
  int threads = 2;
  uint32_t ub_bytes = kChip.ub_bytes;
  CostModel model;
  bool races_allowed = false;  // the launch breaks the rules on purpose: it must still stay inside its tensors
};

Outcome run(const std::vector<Region>& regions, int32_t blocks, const std::function<void()>& kernel,
            const Options& options);

}  // namespace ngram_npu::twin
