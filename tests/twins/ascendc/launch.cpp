// The twin's counterpart of csrc/ascendc/launch.cpp: runs the operators' plans on simulated cores. It has the device
// library's entry points, and further ones for the last fault's message, the cost of launches and the machine that is
// simulated.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "ascendc/plans.h"
#include "core.h"
#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"

#define NGRAM_TWIN_KERNEL(name) extern "C" void name(NgramNpuLaunchArgs args);
NGRAM_NPU_ASCENDC_KERNELS(NGRAM_TWIN_KERNEL)
#undef NGRAM_TWIN_KERNEL

namespace ngram_npu::twin {
namespace {

// The tensors of each operator's Params: the only bytes that a launch may access.
class Regions {
 public:
  template <class T>
  void add(const char* name, T* data, int64_t count) {
    add(name, data, 1, count * static_cast<int64_t>(sizeof(T)), 0, !std::is_const_v<T>);
  }
  void add(const char* name, const IndexArray& indices, int64_t count) {
    add(name, indices.data, 1, count * indices.bytes, 0, false);
  }
  void add(const char* name, const DraftRows& rows, int64_t batch, int64_t k) {
    add(name, rows.data, batch, k * rows.bytes, rows.stride * rows.bytes, true);
  }
  void add(const char* name, const DraftCosts& rows, int64_t batch, int64_t k) {
    add(name, rows.data, batch, k, rows.stride, true);
  }
  template <class T>
  void add(const char* name, const TokenRows<T>& rows) {
    constexpr int64_t item = static_cast<int64_t>(sizeof(T));
    add(name, rows.data, rows.rows, rows.capacity * item, rows.stride * item, !std::is_const_v<T>);
  }
  void add(const char* name, const void* data, int64_t rows, int64_t row_bytes, int64_t pitch, bool writable) {
    if (data == nullptr || rows <= 0 || row_bytes <= 0) return;
    list.push_back({name, reinterpret_cast<uintptr_t>(data), static_cast<uint64_t>(rows),
                    static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows == 1 ? row_bytes : pitch), writable});
  }

  std::vector<Region> list;
};

template <class Params>
constexpr bool is_lookup = std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>;

template <class Params>  // of a lookup
void tensors(const Params& p, Regions& r) {
  if constexpr (std::is_same_v<Params, NgramStepParams>) {
    r.add("sampled_token_ids", p.sampled_token_ids);
    r.add("discard", p.discard, p.batch);
    r.add("next_token_ids", p.next_token_ids, p.batch);
  }
  r.add("token_ids", p.token_ids);
  r.add("num_tokens", p.num_tokens, p.token_ids.rows);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
  r.add("match_costs", p.lookup.match_costs, kCostRows);
  r.add("draft_token_ids", p.draft_token_ids, p.batch, p.lookup.k);
  r.add("draft_costs", p.draft_costs, p.batch, p.lookup.k);
  r.add("num_draft_tokens", p.num_draft_tokens, p.batch);
  r.add("match_len", p.match_len, p.batch);
}

inline void tensors(const PrepareNextTokenIdsParams& p, Regions& r) {
  r.add("sampled_token_ids", p.sampled_token_ids);
  r.add("discard", p.discard, p.batch);
  r.add("backup_token_ids", p.backup_token_ids, p.batch);
  r.add("token_ids", p.token_ids);
  r.add("num_tokens", p.num_tokens, p.token_ids.rows);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("next_token_ids", p.next_token_ids, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
}

inline void tensors(const GatherSampledTokensParams& p, Regions& r) {
  r.add("token_ids", p.token_ids);
  r.add("num_tokens", p.num_tokens, p.token_ids.rows);
  r.add("num_sampled", p.num_sampled, p.batch);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("sampled_tokens", p.sampled_tokens);
}

inline void tensors(const PrepareInputsPaddedParams& p, Regions& r) {
  r.add("cu_num_draft_tokens", p.cu_num_draft_tokens, p.batch);
  r.add("num_sampled", p.num_sampled, p.batch);
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("token_indices_to_sample", p.token_indices_to_sample, p.batch);
  r.add("num_rejected", p.num_rejected, p.batch);
}

inline void tensors(const PrepareInputsParams& p, Regions& r) {
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("seq_lens", p.seq_lens, p.batch);
  r.add("num_rejected", p.num_rejected, p.batch);
  r.add("query_start_loc_out", p.query_start_loc_out, p.batch + 1);
  r.add("seq_lens_out", p.seq_lens_out, p.batch);
  r.add("token_indices", p.token_indices, p.total_tokens);
}

inline void tensors(const CorrectNumComputedTokensParams& p, Regions& r) {
  r.add("num_computed_tokens", p.num_computed_tokens, larger(p.batch, p.num_previous));
  r.add("num_accepted_tokens", p.num_accepted_tokens, p.batch);
  r.add("prev_positions", p.prev_positions, p.batch);
  r.add("num_sampled_prev", p.num_sampled_prev, p.num_previous);
  r.add("num_draft_prev", p.num_draft_prev, p.num_previous);
  r.add("host_num_computed_tokens", p.host_num_computed_tokens, p.batch);
}

inline void tensors(const ComputeSlotMappingParams& p, Regions& r) {
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("positions", p.positions, p.num_positions);
  r.add("block_table", p.block_table);
  r.add("row_indices", p.row_indices, p.batch);
  r.add("slot_mapping", p.slot_mapping, 1, p.num_slots * p.slot_bytes, 0, true);
}

inline void tensors(const CorrectSpecStateParams& p, Regions& r) {
  r.add("positions", p.positions, p.slots.num_positions);  // added before the slots' own region, which is read-only
  tensors(p.counts, r);
  tensors(p.slots, r);
  r.add("seq_lens", p.seq_lens, p.num_seq_lens);
  r.add("discard", p.discard, p.slots.batch);
  r.add("num_tokens", p.num_tokens, p.num_rows);
}

inline void tensors(const PrepareInputIdsParams& p, Regions& r) {
  r.add("input_ids", p.input_ids, p.num_inputs);
  r.add("query_start_loc", p.query_start_loc, p.batch + 1);
  r.add("prev_positions", p.prev_positions, p.batch);
  r.add("next_token_ids", p.next_token_ids, p.draft_token_ids.rows);
  r.add("draft_token_ids", p.draft_token_ids);
  r.add("num_scheduled_drafts", p.num_scheduled_drafts, p.batch);
}

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
  Cost total{};  // kCycles: the sum over launches of each one's slowest block
  uint64_t launches = 0;
  int64_t max_blocks = 0;  // of a launch
  std::atomic<bool> races_allowed{false};
  std::atomic<int64_t> spans{0};  // of lookups, fewer than planned; 0: as planned
  std::atomic<int64_t> tile_tokens{0};
  std::atomic<int64_t> cores{0};  // 0: cycles through machines of several sizes
  std::atomic<uint64_t> seed{1};
  CostModel model;
};

State& state() {
  static State one;
  return one;
}

void account(const Outcome& outcome) {
  State& s = state();
  double slowest = 0;
  for (const Cost& cost : outcome.costs) {  // blocks run in parallel, so their cycles do not add up
    for (size_t item = 0; item < kCycles; ++item) s.total[item] += cost[item];
    slowest = std::max(slowest, cost[kCycles]);
  }
  s.total[kCycles] += slowest + static_cast<double>(outcome.same_line) * s.model.same_line;
  ++s.launches;
  s.max_blocks = std::max(s.max_blocks, static_cast<int64_t>(outcome.costs.size()));
}

// On a small device, small tensors exercise what only large tensors would on a large one: several tiles, passes and
// blocks. A plan that does not fit one device gets the next larger one.
template <class Params>
ascendc::LaunchPlan plan_for(const Params& params, int64_t cores, uint64_t seed, ascendc::DeviceProperties& device) {
  constexpr int64_t kCores[] = {1, 2, 7, 8, 40, 48};
  constexpr int64_t kUbBytes[] = {12 * 1024, 16 * 1024, 48 * 1024, kChip.ub_bytes};
  const int64_t varied = kCores[seed / std::size(kUbBytes) % std::size(kCores)];
  for (size_t size = cores > 0 ? std::size(kUbBytes) - 1 : seed % std::size(kUbBytes);; ++size) {
    device = {cores > 0 ? cores : varied, kUbBytes[size]};
    if (cores == 0 && seed % 3 != 0) device.min_items_per_core = static_cast<int64_t>(seed % 3);
    const ascendc::LaunchPlan plan = ascendc::plan(params, device);
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
  ascendc::DeviceProperties device{};
  ascendc::LaunchPlan plan = plan_for(params, s.cores, s.seed, device);
  if (plan.status != kOk) return plan.status;
  if constexpr (is_lookup<Params>) {
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
    options.ub_bytes = static_cast<uint32_t>(device.ub_bytes);
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

// Sets the number of vector cores of the device; 0: machines of several sizes take turns.
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
  ngram_npu::twin::State& s = ngram_npu::twin::state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  double* const end = std::copy(s.total.begin(), s.total.end(), out);
  end[0] = static_cast<double>(s.launches);
  end[1] = static_cast<double>(s.max_blocks);
  s.total = {};
  s.launches = 0;
  s.max_blocks = 0;
}

// Launch plans as JSON, for tests: the plans are plain host functions and need no NPU.
namespace {

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

std::string json(const CoreTiling& s) {
  return "{\"per_pass\": " + std::to_string(s.per_pass) + ", \"cores\": " + std::to_string(s.cores) + "}";
}

std::string json(const BatchTiling& t) {
  return "{\"requests\": " + json(t.requests) + ", \"tokens\": " + json(t.tokens) + "}";
}

std::string json(const LookupTiling& t) {
  return "{\"launches\": " + std::to_string(t.launches) + ", \"spans\": " + std::to_string(t.spans) +
         ", \"items\": " + json(t.items) + ", \"tile_tokens\": " + std::to_string(t.tile_tokens) +
         ", \"requests\": " + json(t.requests) + "}";
}

// The sizes that plans depend on.
struct Sizes {
  int64_t batch, capacity, k, total_tokens, num_slots, num_positions, num_seq_lens;
};

template <class Params>
Params params_of(const Sizes& sizes) {
  Params p{};
  if constexpr (std::is_same_v<Params, CorrectSpecStateParams>) {
    p.counts.batch = sizes.batch;
    p.num_seq_lens = sizes.num_seq_lens;
    p.slots.num_positions = sizes.num_positions;
    p.slots.num_slots = sizes.num_slots;
  } else if constexpr (std::is_same_v<Params, ComputeSlotMappingParams>) {
    p.num_slots = sizes.num_slots;
  } else {
    p.batch = sizes.batch;
  }
  if constexpr (std::is_same_v<Params, PrepareInputsParams>) p.total_tokens = sizes.total_tokens;
  if constexpr (twin::is_lookup<Params>) {
    p.token_ids.capacity = sizes.capacity;
    p.lookup.k = sizes.k;
    p.draft_token_ids = {nullptr, sizes.k, sizeof(int32_t)};
  }
  return p;
}

template <class Params>
constexpr bool has_batch_tiling =
    std::is_same_v<Params, PrepareInputsParams> || std::is_same_v<Params, CorrectNumComputedTokensParams> ||
    std::is_same_v<Params, CorrectSpecStateParams>;

// null where the machine cannot carry the operator out.
template <class Params>
std::string plan_as_json(const Sizes& sizes, const DeviceProperties& device) {
  using Tiling = std::conditional_t<twin::is_lookup<Params>, LookupTiling,
                                    std::conditional_t<has_batch_tiling<Params>, BatchTiling, CoreTiling>>;
  const LaunchPlan launch_plan = plan(params_of<Params>(sizes), device);
  if (launch_plan.status != kOk) return "null";
  constexpr const char* kNames[] = {
#define NGRAM_NPU_NAME(name) #name,
      NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
  };
  Tiling tiling;
  std::memcpy(&tiling, launch_plan.args.tiling, sizeof(tiling));
  std::string launches;
  for (int32_t i = 0; i < launch_plan.num_launches; ++i) {
    launches += std::string(i > 0 ? ", " : "") + "[\"" + kNames[static_cast<size_t>(launch_plan.launches[i].kernel)] +
                "\", " + std::to_string(launch_plan.launches[i].blocks) + "]";
  }
  return "{\"launches\": [" + launches + "], \"workspace_bytes\": " + std::to_string(launch_plan.workspace_bytes) +
         ", \"tiling\": " + json(tiling) + "}";
}

std::string plan_of(const std::string& op, const Sizes& sizes, const DeviceProperties& device) {
#define NGRAM_TWIN_PLAN(name, Params) \
  if (op == #name) return plan_as_json<Params>(sizes, device);
  NGRAM_NPU_ASCENDC_OPS(NGRAM_TWIN_PLAN)
#undef NGRAM_TWIN_PLAN
  return "";
}

}  // namespace

// Bytes of the JSON, 0 for an operator without kernels.
NGRAM_NPU_EXPORT int64_t ngram_npu_ascendc_twin_plan(const char* op, const Sizes* sizes, int64_t vector_cores,
                                                     int64_t ub_bytes, char* text, int64_t bytes) {
  const std::string json_text = plan_of(op, *sizes, {vector_cores, ub_bytes});
  std::snprintf(text, static_cast<size_t>(bytes), "%s", json_text.c_str());
  return static_cast<int64_t>(json_text.size());
}
