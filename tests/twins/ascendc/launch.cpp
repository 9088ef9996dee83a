// The twin's counterpart of csrc/ascendc/launch.cpp: runs the operators' plans on simulated cores. It has the device
// library's entry points, and further ones for the last fault's message, the cost of launches and the machine that is
// simulated.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "ascendc/plans.h"
#include "regions.h"
#include "run.h"

#define NGRAM_TWIN_KERNEL(name) extern "C" void name(NgramNpuLaunchArgs args);
NGRAM_NPU_ASCENDC_KERNELS(NGRAM_TWIN_KERNEL)
#undef NGRAM_TWIN_KERNEL

namespace ngram_npu::twin {
namespace {

using KernelFunction = void (*)(NgramNpuLaunchArgs);
constexpr KernelFunction kKernels[] = {
#define NGRAM_TWIN_KERNEL(name) name,
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_TWIN_KERNEL)
#undef NGRAM_TWIN_KERNEL
};

// State of the process: the last fault, and the cost of the launches since it was last read.
struct State {
  std::mutex mutex;
  std::string fault;
  Cost total;  // `cycles`: the sum over launches of each one's slowest block
  uint64_t launches = 0;
  int64_t max_blocks = 0;  // of a launch
  std::atomic<bool> races_allowed{false};
  std::atomic<int64_t> spans{0};  // of lookups, fewer than planned; 0: as planned
  std::atomic<int64_t> tile_tokens{0};
  std::atomic<int64_t> cores{0};  // 0: machines of several sizes in turn
  std::atomic<uint64_t> seed{1};
  CostModel model;
};

State& state() {
  static State one;
  return one;
}

void account(const Outcome& outcome) {
  State& s = state();
  const std::vector<Cost>& costs = outcome.costs;
  double slowest = 0;
  for (const Cost& cost : costs) {
    s.total.add_counts(cost);
    slowest = std::max(slowest, cost.cycles);
  }
  s.total.cycles += slowest + static_cast<double>(outcome.same_line) * s.model.same_line;
  ++s.launches;
  s.max_blocks = std::max(s.max_blocks, static_cast<int64_t>(costs.size()));
}

// On a small machine, small tensors exercise what only large tensors would on a large one: several tiles, passes and
// blocks. A plan that does not fit one machine gets the next larger one.
template <class Params>
ascendc::LaunchPlan plan_for(const Params& params, int64_t cores, uint64_t seed, ascendc::Machine& machine) {
  constexpr int64_t kCores[] = {1, 2, 7, 8, 40, 48};
  constexpr int64_t kUbBytes[] = {12 * 1024, 16 * 1024, 48 * 1024, kChip.ub_bytes};
  const int64_t varied = kCores[seed / std::size(kUbBytes) % std::size(kCores)];
  for (size_t size = cores > 0 ? std::size(kUbBytes) - 1 : seed % std::size(kUbBytes);; ++size) {
    machine = {cores > 0 ? cores : varied, kUbBytes[size]};
    if (cores == 0 && seed % 3 != 0) machine.least_items = static_cast<int64_t>(seed % 3);
    const ascendc::LaunchPlan plan = ascendc::plan(params, machine);
    if (plan.status == kOk || size + 1 == std::size(kUbBytes)) return plan;
  }
}

// Replaces a lookup's planned spans and tiles where a test asks for a worse plan.
void worsen(const State& s, int64_t batch, ascendc::LaunchPlan& plan) {
  ascendc::LookupTiling tiling{};
  std::memcpy(&tiling, plan.args.tiling, sizeof(tiling));
  if (s.spans > 0) tiling.spans = s.spans;
  if (s.tile_tokens > 0) tiling.tile_tokens = s.tile_tokens;
  tiling.items.cores = std::min(tiling.items.cores, batch * tiling.spans);
  std::memcpy(plan.args.tiling, &tiling, sizeof(tiling));
  if (plan.num_launches > 0) plan.launches[0].blocks = static_cast<uint32_t>(tiling.items.cores);
}

template <class Params>
int32_t carry_out(const Params& params) {
  State& s = state();
  ascendc::Machine machine{};
  ascendc::LaunchPlan plan = plan_for(params, s.cores, s.seed, machine);
  if (plan.status != kOk) return plan.status;
  if constexpr (std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>) {
    worsen(s, params.batch, plan);
  }
  Regions regions;
  tensors(params, regions);
  // Uninitialised, as an allocator's memory is; no tensor lies next to it.
  std::vector<uint64_t> workspace(static_cast<size_t>(plan.workspace_bytes + 7) / 8, 0xA5A5A5A5A5A5A5A5u);
  if (plan.workspace_bytes > 0) {
    plan.set_workspace(workspace.data());
    regions.add("workspace", workspace.data(), 1, plan.workspace_bytes, 0, true);
  }
  for (int32_t i = 0; i < plan.num_launches; ++i) {
    const ascendc::Launch& launch = plan.launches[i];
    Options options;
    options.seed = s.seed + static_cast<uint64_t>(i);
    options.ub_bytes = static_cast<uint32_t>(machine.ub_bytes);
    options.model = s.model;
    options.races_allowed = s.races_allowed;
    const KernelFunction kernel = kKernels[static_cast<size_t>(launch.kernel)];
    const Outcome outcome = run(regions.list, static_cast<int32_t>(launch.blocks), [&] { kernel(plan.args); }, options);
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (!outcome.fault.empty()) {
      s.fault = outcome.fault;
      return kLaunchFailed;
    }
    account(outcome);
  }
  ++s.seed;
  return kOk;
}

}  // namespace
}  // namespace ngram_npu::twin

#define NGRAM_TWIN_ENTRY_POINT(op, Params)                                                      \
  NGRAM_NPU_EXPORT int32_t ngram_npu_ascendc_##op(const ngram_npu::Params* params, void*) {     \
    return params == nullptr ? ngram_npu::kInvalidParams : ngram_npu::twin::carry_out(*params); \
  }
NGRAM_NPU_ASCENDC_OPS(NGRAM_TWIN_ENTRY_POINT)
#undef NGRAM_TWIN_ENTRY_POINT

// Sets the number of vector cores of the machine; 0: machines of several sizes take turns.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_set_cores(int64_t cores) { ngram_npu::twin::state().cores = cores; }

// Overrides how lookups are split: spans per row (fewer than planned) and tokens per tile. 0, 0: as planned.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_set_lookup(int64_t spans, int64_t tile_tokens) {
  ngram_npu::twin::state().spans = spans;
  ngram_npu::twin::state().tile_tokens = tile_tokens;
}

// Whether launches may race, as launches on class-B input do. They must still stay inside their tensors.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_allow_races(int32_t allowed) {
  ngram_npu::twin::state().races_allowed = allowed != 0;
}

// Message of the last failed check; empty if none failed. Valid until the next call.
NGRAM_NPU_EXPORT const char* ngram_npu_ascendc_twin_fault() {
  static thread_local std::string copy;
  const std::lock_guard<std::mutex> lock(ngram_npu::twin::state().mutex);
  copy = ngram_npu::twin::state().fault;
  return copy.c_str();
}

// Sets the model's prices: the members of CostModel, in order.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_set_model(const double* values) {
  static_assert(sizeof(ngram_npu::twin::CostModel) == 12 * sizeof(double));
  std::memcpy(static_cast<void*>(&ngram_npu::twin::state().model), values, sizeof(ngram_npu::twin::CostModel));
}

// The cost of the launches since the last call of this, as 12 numbers. Sums over all blocks: bytes from and to global
// memory, copies, vector instructions, their repeats of 256 bytes, scalar accesses to UB and to global memory, scalar
// cache misses, flags and barriers. Then modelled cycles (summed over launches), launches, blocks of the largest.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_take_cost(double* out) {
  using ngram_npu::twin::Cost;
  ngram_npu::twin::State& s = ngram_npu::twin::state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const Cost& c = s.total;
  const double numbers[] = {static_cast<double>(c.gm_to_ub_bytes), static_cast<double>(c.ub_to_gm_bytes),
                            static_cast<double>(c.copies),         static_cast<double>(c.vector_instructions),
                            static_cast<double>(c.vector_repeats), static_cast<double>(c.scalar_ub),
                            static_cast<double>(c.scalar_gm),      static_cast<double>(c.scalar_gm_misses),
                            static_cast<double>(c.syncs),          c.cycles,
                            static_cast<double>(s.launches),       static_cast<double>(s.max_blocks)};
  std::copy(std::begin(numbers), std::end(numbers), out);
  s.total = Cost();
  s.launches = 0;
  s.max_blocks = 0;
}
