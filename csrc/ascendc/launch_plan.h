// From an operator's parameters and the machine to the launches that carry it out: what torch_npu's launcher and the
// host twin share. Torch-free and CANN-free; plans.h makes the plan of each operator.
//
// A launcher finds bytes for the workspace (uninitialised, this call's own until its last launch has run), sets it, and
// launches in order on one stream: a launch sees what the one before it wrote.
#pragma once

#include <cstring>
#include <type_traits>

#include "ascendc/kernels.h"
#include "ascendc/launch_args.h"
#include "ascendc/tilings.h"
#include "core/common.h"

namespace ngram_npu::ascendc {

// Asked of the platform at run time.
struct Machine {
  int64_t vector_cores;
  int64_t ub_bytes;  // unified buffer of one core
};

// What a kernel may not use of the unified buffer: the runtime's own 8 KB, and 256 bytes of slack.
constexpr int64_t kReservedUbBytes = 8 * 1024 + 256;

inline bool can_run(const Machine& machine, int64_t ub_bytes) {
  return machine.vector_cores >= 1 && ub_bytes <= machine.ub_bytes - kReservedUbBytes;
}

enum class Kernel : int32_t {
#define NGRAM_NPU_NAME(name) name,
  NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
};

struct Launch {
  Kernel kernel;
  uint32_t blocks;
};

struct LaunchPlan {
  static constexpr int32_t kMaxLaunches = 2;

  Status status = kInvalidParams;  // not kOk: there is nothing to launch, the machine cannot carry it out
  int32_t num_launches = 0;        // 0: nothing to do
  Launch launches[kMaxLaunches] = {};
  int64_t workspace_bytes = 0;
  NgramNpuLaunchArgs args = {};  // the same for each launch

  void set_workspace(void* device_address) { args.workspace = reinterpret_cast<uint64_t>(device_address); }

  void add(Kernel kernel, int64_t blocks) {
    if (blocks > 0) launches[num_launches++] = {kernel, static_cast<uint32_t>(blocks)};
  }
};

template <class Params, class Tiling>
LaunchPlan plan_with(const Params& params, const Tiling& tiling) {
  static_assert(std::is_trivially_copyable_v<Params> && std::is_trivially_copyable_v<Tiling>);
  static_assert(sizeof(Params) <= sizeof(NgramNpuLaunchArgs::params));
  static_assert(sizeof(Tiling) <= sizeof(NgramNpuLaunchArgs::tiling));
  LaunchPlan plan;
  plan.status = kOk;
  std::memcpy(plan.args.params, &params, sizeof(params));
  std::memcpy(plan.args.tiling, &tiling, sizeof(tiling));
  return plan;
}

// Neighbours may share a 32-byte unit of memory: copies write exactly their bytes.
inline Shares deal_out(int64_t items, const Machine& machine, int64_t max_per_pass) {
  const int64_t even = (items + machine.vector_cores - 1) / machine.vector_cores;
  const int64_t per_pass = smaller(larger<int64_t>(even, 1), max_per_pass);
  return {per_pass, smaller(machine.vector_cores, (items + per_pass - 1) / per_pass)};
}

// Items a core of a bookkeeping kernel stages at a time, at most: what any unified buffer has room for.
constexpr int64_t kMaxPerPass = 1024;

constexpr int64_t kStretchBytes = kStretch * int64_t{sizeof(int32_t)};

// One launch, one item a request, `bytes` of the unified buffer an item.
template <class Params>
LaunchPlan plan_requests(const Params& p, const Machine& machine, int64_t bytes, Kernel kernel) {
  if (!can_run(machine, kMaxPerPass * bytes)) return {};
  const Shares requests = deal_out(p.batch, machine, kMaxPerPass);
  LaunchPlan plan = plan_with(p, requests);
  plan.add(kernel, requests.cores);
  return plan;
}

}  // namespace ngram_npu::ascendc
