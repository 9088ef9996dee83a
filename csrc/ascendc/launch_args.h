// The argument of every kernel, passed by value. CANN's generator of launch stubs copies the text of this struct into
// files without our headers, so it is plain, in the global namespace, and made of built-in types. Only the host's plan
// (launch_plan.h) and the kernel (device.h) interpret its words.
#pragma once

#include <cstdint>

struct NgramNpuLaunchArgs {
  uint64_t params[48];  // <Op>Params, whose pointers are device addresses
  uint64_t tiling[8];   // <Op>Tiling
  uint64_t workspace;   // device address of the workspace, whose size is in the plan
};
