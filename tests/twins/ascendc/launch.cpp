// Runs the operators' launch plans on simulated cores; the device library has csrc/ascendc/launch.cpp instead. The twin
// has the entry points of the device library, and entry points for the last fault's message, the cost of launches and
// the simulated machine.
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
#include "core/merging.h"
#include "core/store.h"

#define NGRAM_TWIN_KERNEL(name) extern "C" void name(NgramNpuLaunchArgs args);
NGRAM_NPU_ASCENDC_KERNELS(NGRAM_TWIN_KERNEL)
#undef NGRAM_TWIN_KERNEL

namespace ngram_npu::twin {
namespace {

// Collects the tensors of an operator's Params, which are the only bytes that a launch may access.
class RegionList {
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
  template <class T>
  void add(const char* name, const TokenRows<T>& rows) {
    constexpr int64_t item = static_cast<int64_t>(sizeof(T));
    add(name, rows.data, rows.rows, rows.capacity * item, rows.stride * item, !std::is_const_v<T>);
  }
  void add(const char* name, const void* data, int64_t rows, int64_t row_bytes, int64_t pitch, bool writable) {
    if (data == nullptr || rows <= 0 || row_bytes <= 0) return;
    regions.push_back({name, reinterpret_cast<uintptr_t>(data), static_cast<uint64_t>(rows),
                       static_cast<uint64_t>(row_bytes), static_cast<uint64_t>(rows == 1 ? row_bytes : pitch),
                       writable});
  }

  std::vector<Region> regions;
};

template <class Params>
constexpr bool is_lookup = std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>;

// The following overloads add the tensors of one operator; the template has the overloads of both lookups.
template <class Params>
void add_tensors(const Params& params, RegionList& list) {
  if constexpr (std::is_same_v<Params, NgramStepParams>) {
    list.add("sampled_token_ids", params.sampled_token_ids);
    list.add("discard", params.discard, params.batch);
    list.add("next_token_ids", params.next_token_ids, params.batch);
  }
  list.add("token_ids", params.token_ids);
  list.add("num_tokens", params.num_tokens, params.token_ids.rows);
  list.add("row_indices", params.row_indices, params.batch);
  list.add("num_sampled", params.num_sampled, params.batch);
  list.add("draft_token_ids", params.draft_token_ids, params.batch, params.lookup.k);
  list.add("num_draft_tokens", params.num_draft_tokens, params.batch);
  list.add("match_len", params.match_len, params.batch);
}

inline void add_tensors(const PrepareNextTokenIdsParams& params, RegionList& list) {
  list.add("sampled_token_ids", params.sampled_token_ids);
  list.add("discard", params.discard, params.batch);
  list.add("backup_token_ids", params.backup_token_ids, params.batch);
  list.add("token_ids", params.token_ids);
  list.add("num_tokens", params.num_tokens, params.token_ids.rows);
  list.add("row_indices", params.row_indices, params.batch);
  list.add("next_token_ids", params.next_token_ids, params.batch);
  list.add("num_sampled", params.num_sampled, params.batch);
}

inline void add_tensors(const PrepareInputsPaddedParams& params, RegionList& list) {
  list.add("cu_num_draft_tokens", params.cu_num_draft_tokens, params.batch);
  list.add("num_sampled", params.num_sampled, params.batch);
  list.add("query_start_loc", params.query_start_loc, params.batch + 1);
  list.add("token_indices_to_sample", params.token_indices_to_sample, params.batch);
  list.add("num_rejected", params.num_rejected, params.batch);
}

inline void add_tensors(const PrepareInputsParams& params, RegionList& list) {
  list.add("query_start_loc", params.query_start_loc, params.batch + 1);
  list.add("seq_lens", params.seq_lens, params.batch);
  list.add("num_rejected", params.num_rejected, params.batch);
  list.add("query_start_loc_out", params.query_start_loc_out, params.batch + 1);
  list.add("seq_lens_out", params.seq_lens_out, params.batch);
  list.add("token_indices", params.token_indices, params.total_tokens);
}

inline void add_tensors(const CorrectNumComputedTokensParams& params, RegionList& list) {
  list.add("num_computed_tokens", params.num_computed_tokens, larger(params.batch, params.num_previous));
  list.add("num_accepted_tokens", params.num_accepted_tokens, params.batch);
  list.add("prev_positions", params.prev_positions, params.batch);
  list.add("num_sampled_prev", params.num_sampled_prev, params.num_previous);
  list.add("num_draft_prev", params.num_draft_prev, params.num_previous);
  list.add("host_num_computed_tokens", params.host_num_computed_tokens, params.batch);
}

inline void add_tensors(const ComputeSlotMappingParams& params, RegionList& list) {
  list.add("query_start_loc", params.query_start_loc, params.batch + 1);
  list.add("positions", params.positions, params.num_positions);
  list.add("block_table", params.block_table);
  list.add("row_indices", params.row_indices, params.batch);
  list.add("slot_mapping", params.slot_mapping, 1, params.num_slots * params.slot_bytes, 0, true);
}

inline void add_tensors(const CorrectSpecStateParams& params, RegionList& list) {
  list.add("positions", params.positions,
           params.slots.num_positions);  // before the region of params.slots, which is read-only
  add_tensors(params.counts, list);
  add_tensors(params.slots, list);
  list.add("seq_lens", params.seq_lens, params.num_seq_lens);
  list.add("discard", params.discard, params.slots.batch);
  list.add("num_tokens", params.num_tokens, params.num_rows);
}

inline void add_tensors(const PrepareInputIdsParams& params, RegionList& list) {
  list.add("input_ids", params.input_ids, params.num_inputs);
  list.add("query_start_loc", params.query_start_loc, params.batch + 1);
  list.add("prev_positions", params.prev_positions, params.batch);
  list.add("next_token_ids", params.next_token_ids, params.draft_token_ids.rows);
  list.add("draft_token_ids", params.draft_token_ids);
  list.add("num_scheduled_drafts", params.num_scheduled_drafts, params.batch);
}

inline void add_tensors(const MergeDraftsParams& params, RegionList& list) {
  const auto rows = [&](const char* name, const void* data, int64_t width, int64_t stride) {
    list.add(name, data, params.batch, width * params.token_bytes, stride * params.token_bytes,
             data == params.draft_token_ids);
  };
  rows("neural_draft_token_ids", params.neural_draft_token_ids, params.neural_width, params.neural_stride);
  rows("draft_token_ids", params.draft_token_ids, params.ngram_draft_token_ids.capacity,
       params.ngram_draft_token_ids.capacity);
  list.add("ngram_draft_token_ids", params.ngram_draft_token_ids);
  list.add("num_ngram_draft_tokens", params.num_ngram_draft_tokens, params.batch);
  list.add("match_len", params.match_len, params.batch);
  list.add("num_neural_draft_tokens", params.num_neural_draft_tokens, params.batch);
  list.add("draft_costs", params.draft_costs);
  list.add("neural_draft_costs", params.neural_draft_costs);
  list.add("row_indices", params.row_indices, params.batch);
  list.add("num_sampled", params.num_sampled, params.batch);
  list.add("num_scheduled_drafts", params.num_scheduled_drafts, params.batch);
  list.add("neural_acceptance", params.neural_acceptance);
  list.add("num_draft_tokens", params.num_draft_tokens, params.batch);
  list.add("draft_source", params.draft_source, params.batch);
}

// The tensors that both operators of the store have.
template <class Params>
void add_store_tensors(const Params& params, RegionList& list) {
  list.add("token_ids", params.token_ids);
  list.add("num_tokens", params.num_tokens, params.token_ids.rows);
  list.add("num_sampled", params.num_sampled, params.batch);
  list.add("row_indices", params.row_indices, params.batch);
  list.add("scopes", params.scopes, params.batch);
  list.add("text", params.contents.text);
  list.add("blocks", params.contents.blocks);
  list.add("table", params.contents.table);
}

inline void add_tensors(const StoreAppendParams& params, RegionList& list) {
  add_store_tensors(params, list);
  list.add("slot_indices", params.slot_indices, params.batch);
  list.add("slots", params.slots);
  list.add("allocator", params.allocator, store::kAllocatorWords);
}

inline void add_tensors(const StoreProposeParams& params, RegionList& list) {
  add_store_tensors(params, list);
  list.add("draft_token_ids", params.draft_token_ids, params.batch, params.k);
  list.add("num_draft_tokens", params.num_draft_tokens, params.batch);
  list.add("match_len", params.match_len, params.batch);
  list.add("agreement", params.agreement, params.batch);
}

using KernelFunction = void (*)(NgramNpuLaunchArgs);
constexpr KernelFunction kKernels[] = {
#define NGRAM_TWIN_KERNEL(name) name,
    NGRAM_NPU_ASCENDC_KERNELS(NGRAM_TWIN_KERNEL)
#undef NGRAM_TWIN_KERNEL
};

// State of the process: the last fault, the cost of the launches since the cost was last read, and the tests' settings.
struct State {
  std::mutex mutex;
  std::string fault;
  Cost total_cost{};  // kCycles: the sum over all launches of the cycles of the launch's slowest block
  uint64_t num_launches = 0;
  int64_t max_blocks = 0;  // the largest number of blocks of a launch
  std::atomic<bool> races_allowed{false};
  std::atomic<int64_t> num_cores{0};  // 0: cycles through machines of several sizes
  std::atomic<uint64_t> seed{1};
  CostModel model;
};

State& get_state() {
  static State state;
  return state;
}

void add_costs(const Outcome& outcome) {
  State& s = get_state();
  double max_cycles = 0;
  double num_bytes = 0;
  for (const Cost& cost : outcome.costs) {  // blocks run in parallel, so their cycles do not add up
    for (size_t item = 0; item < kCycles; ++item) s.total_cost[item] += cost[item];
    max_cycles = std::max(max_cycles, cost[kCycles]);
    num_bytes += cost[kGmToUbBytes] + cost[kUbToGmBytes];
  }
  // The memory limits all cores together, after the latency of the first copy.
  max_cycles = std::max(max_cycles, s.model.copy_latency + num_bytes / s.model.gm_bytes_per_cycle);
  s.total_cost[kCycles] += max_cycles + static_cast<double>(outcome.max_copies_per_line) * s.model.same_line;
  ++s.num_launches;
  s.max_blocks = std::max(s.max_blocks, static_cast<int64_t>(outcome.costs.size()));
}

// Plans a launch on a device whose size depends on the seed: on a small device, small tensors are also divided into
// several tiles, passes and blocks. If the plan does not fit the device, the next larger device is used. With
// num_cores > 0, the device has that number of cores and the full UB.
template <class Params>
ascendc::LaunchPlan make_plan(const Params& params, int64_t num_cores, uint64_t seed) {
  constexpr int64_t kCores[] = {1, 2, 7, 8, 40, 48};
  constexpr int64_t kUbBytes[] = {12 * 1024, 16 * 1024, 48 * 1024, kChip.ub_bytes};
  const int64_t seeded_cores = kCores[seed / std::size(kUbBytes) % std::size(kCores)];
  for (size_t size = num_cores > 0 ? std::size(kUbBytes) - 1 : seed % std::size(kUbBytes);; ++size) {
    ascendc::DeviceProperties device{num_cores > 0 ? num_cores : seeded_cores, kUbBytes[size]};
    if (num_cores == 0 && seed % 3 != 0) device.min_items_per_core = static_cast<int64_t>(seed % 3);
    const ascendc::LaunchPlan plan = ascendc::plan(params, device);
    if (plan.status == kOk || size + 1 == std::size(kUbBytes)) return plan;
  }
}

template <class Params>
int32_t run_operator(const Params& params) {
  State& s = get_state();
  ascendc::LaunchPlan plan = make_plan(params, s.num_cores, s.seed);
  if (plan.status != kOk) return plan.status;
  RegionList tensors;
  add_tensors(params, tensors);
  // The workspace has arbitrary contents, like memory from an allocator. No tensor is adjacent to it.
  std::vector<uint64_t> workspace(static_cast<size_t>(plan.workspace_bytes + 7) / 8, 0xA5A5A5A5A5A5A5A5u);
  if (plan.workspace_bytes > 0) {
    plan.set_workspace(workspace.data());
    tensors.add("workspace", workspace.data(), 1, plan.workspace_bytes, 0, true);
  }
  for (int32_t i = 0; i < plan.num_launches; ++i) {
    const ascendc::Launch& launch = plan.launches[i];
    Options options;
    options.seed = s.seed + static_cast<uint64_t>(i);
    // The kernel gets no more than the planned bytes, so that a plan with too few bytes is a fault.
    options.ub_bytes = static_cast<uint32_t>(launch.ub_bytes + ascendc::kReservedUbBytes);
    options.model = s.model;
    options.races_allowed = s.races_allowed;
    const KernelFunction kernel = kKernels[static_cast<size_t>(launch.kernel)];
    const Outcome outcome =
        run(tensors.regions, static_cast<int32_t>(launch.blocks), [&] { kernel(plan.args); }, options);
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (!outcome.fault.empty()) {
      s.fault = outcome.fault;
      return kLaunchFailed;
    }
    add_costs(outcome);
  }
  ++s.seed;
  return kOk;
}

}  // namespace
}  // namespace ngram_npu::twin

#define NGRAM_TWIN_ENTRY_POINT(op, Params)                                                         \
  NGRAM_NPU_EXPORT int32_t ngram_npu_ascendc_##op(const ngram_npu::Params* params, void*) {        \
    return params == nullptr ? ngram_npu::kInvalidParams : ngram_npu::twin::run_operator(*params); \
  }
NGRAM_NPU_ASCENDC_OPS(NGRAM_TWIN_ENTRY_POINT)
#undef NGRAM_TWIN_ENTRY_POINT

// Sets the number of vector cores of the device. 0: the launches cycle through devices of several sizes.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_set_cores(int64_t num_cores) {
  ngram_npu::twin::get_state().num_cores = num_cores;
}

// Sets whether launches may race, as those whose results are unspecified do. Accesses outside their tensors are still
// faults.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_allow_races(int32_t allowed) {
  ngram_npu::twin::get_state().races_allowed = allowed != 0;
}

// Returns the message of the last failed check; empty if none failed. Valid until the thread's next call.
NGRAM_NPU_EXPORT const char* ngram_npu_ascendc_twin_fault() {
  static thread_local std::string fault;
  const std::lock_guard<std::mutex> lock(ngram_npu::twin::get_state().mutex);
  fault = ngram_npu::twin::get_state().fault;
  return fault.c_str();
}

// Sets the costs of the model: the members of CostModel, in order.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_set_model(const double* values) {
  static_assert(sizeof(ngram_npu::twin::CostModel) == 12 * sizeof(double));
  std::memcpy(static_cast<void*>(&ngram_npu::twin::get_state().model), values, sizeof(ngram_npu::twin::CostModel));
}

// Writes the cost of the launches since the previous call of this function, as 12 numbers. The first nine are sums over
// all blocks: bytes from and to global memory, copies, vector instructions, their repeats of 256 bytes, scalar accesses
// to UB and to global memory, scalar cache misses, flags set or waited for. Then follow the modelled cycles (summed
// over launches), the number of launches, and the number of blocks of the largest launch.
NGRAM_NPU_EXPORT void ngram_npu_ascendc_twin_take_cost(double* out) {
  ngram_npu::twin::State& s = ngram_npu::twin::get_state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  double* const end = std::copy(s.total_cost.begin(), s.total_cost.end(), out);
  end[0] = static_cast<double>(s.num_launches);
  end[1] = static_cast<double>(s.max_blocks);
  s.total_cost = {};
  s.num_launches = 0;
  s.max_blocks = 0;
}
