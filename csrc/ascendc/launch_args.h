// What every kernel takes, by value. The generator of CANN's launch stubs copies this struct by its text into files
// that see nothing else of us: so it is plain, in the global namespace, and made of built-in types. What its words mean
// is known to the host's plan (launch_plan.h) and the kernel (device.h) alone.
#pragma once

#include <cstdint>

struct NgramNpuLaunchArgs {
  uint64_t params[48];  // <Op>Params, whose pointers are device addresses
  uint64_t tiling[8];   // <Op>Tiling
  uint64_t workspace;   // device address of as many bytes as the plan asks for
};
