// How the plan of a launch divides the work: decided on the host (<op>_tiling.h), followed by the kernels. No
// functions, because the AscendC compiler lets host and device code call only their own.
#pragma once

#include <cstdint>

namespace ngram_npu::ascendc {

// Items dealt out to the cores in passes of neighbours, so that what a pass writes is one piece of memory: pass q of
// core c starts at item (q * cores + c) * per_pass.
struct Shares {
  int64_t per_pass;
  int64_t cores;  // 0 where there are no items
};

}  // namespace ngram_npu::ascendc
