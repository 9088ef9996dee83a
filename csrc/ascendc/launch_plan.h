// The launch plan of an operator: its kernels, their numbers of cores, and the workspace. plans.h computes it from the
// operator's parameters and the device's properties. torch_npu's launcher and the host twin use it, so this file uses
// neither torch nor CANN.
//
// A launcher allocates the workspace (uninitialised, exclusive to this call until its last launch has run), sets its
// address in the plan, and launches the kernels in order on one stream. A launch sees the results of earlier launches.
#pragma once

#include <cstring>
#include <type_traits>

#include "ascendc/launch_args.h"
#include "core/common.h"

// The names of the kernels. Each kernel is `extern "C" __global__ __aicore__ void <name>(NgramNpuLaunchArgs)`.
#define NGRAM_NPU_ASCENDC_KERNELS(X)       \
  X(ngram_npu_compute_slot_mapping)        \
  X(ngram_npu_copy_num_computed_tokens)    \
  X(ngram_npu_correct_num_computed_tokens) \
  X(ngram_npu_correct_spec_state)          \
  X(ngram_npu_merge_drafts)                \
  X(ngram_npu_ngram_propose)               \
  X(ngram_npu_ngram_propose_draft)         \
  X(ngram_npu_ngram_propose_search)        \
  X(ngram_npu_ngram_step)                  \
  X(ngram_npu_ngram_step_draft)            \
  X(ngram_npu_ngram_step_search)           \
  X(ngram_npu_prepare_input_ids)           \
  X(ngram_npu_prepare_inputs)              \
  X(ngram_npu_prepare_inputs_padded)       \
  X(ngram_npu_prepare_next_token_ids)      \
  X(ngram_npu_store_append)                \
  X(ngram_npu_store_append_copy)           \
  X(ngram_npu_store_append_write)          \
  X(ngram_npu_store_propose)

namespace ngram_npu::ascendc {

// Properties of the device, queried at run time.
struct DeviceProperties {
  int64_t vector_cores;
  int64_t ub_bytes;  // unified buffer of one core
  // Minimum number of items per core. With fewer items, several cores write to the same line of 512 bytes, and the
  // hardware executes these writes one after another.
  int64_t min_items_per_core = 32;
};

// Bytes of the unified buffer that a kernel must not use: 8 KB for the runtime, and 256 bytes of slack.
constexpr int64_t kReservedUbBytes = 8 * 1024 + 256;

inline bool can_run(const DeviceProperties& device, int64_t ub_bytes) {
  return device.vector_cores >= 1 && ub_bytes <= device.ub_bytes - kReservedUbBytes;
}

enum class Kernel : int32_t {
#define NGRAM_NPU_NAME(name) name,
  NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
};

struct Launch {
  Kernel kernel;
  uint32_t blocks;
  int64_t ub_bytes;  // unified buffer bytes that the kernel allocates at most
};

struct LaunchPlan {
  static constexpr int32_t kMaxLaunches = 3;

  Status status = kInvalidParams;  // if not kOk, the device cannot run the operator
  int32_t num_launches = 0;
  Launch launches[kMaxLaunches] = {};
  int64_t workspace_bytes = 0;
  NgramNpuLaunchArgs args = {};  // the same for each launch

  void set_workspace(void* device_address) { args.workspace = reinterpret_cast<uint64_t>(device_address); }

  void add_launch(Kernel kernel, int64_t blocks, int64_t ub_bytes) {
    if (blocks > 0) launches[num_launches++] = {kernel, static_cast<uint32_t>(blocks), ub_bytes};
  }
};

template <class Params, class Tiling>
LaunchPlan make_plan(const Params& params, const Tiling& tiling) {
  static_assert(std::is_trivially_copyable_v<Params> && std::is_trivially_copyable_v<Tiling>);
  static_assert(sizeof(Params) <= sizeof(NgramNpuLaunchArgs::params));
  static_assert(sizeof(Tiling) <= sizeof(NgramNpuLaunchArgs::tiling));
  LaunchPlan plan;
  plan.status = kOk;
  std::memcpy(plan.args.params, &params, sizeof(params));
  std::memcpy(plan.args.tiling, &tiling, sizeof(tiling));
  return plan;
}

// Divides `items` among the cores, with at most `max_per_pass` items per pass. Output ranges of neighbouring cores may
// lie in the same 32-byte block, because a copy writes only the requested bytes.
inline CoreTiling split_over_cores(int64_t items, const DeviceProperties& device, int64_t max_per_pass) {
  if (device.vector_cores < 1) return {};
  const int64_t items_per_core = (items + device.vector_cores - 1) / device.vector_cores;
  const int64_t per_pass = smaller(larger(items_per_core, device.min_items_per_core), max_per_pass);
  return {per_pass, smaller(device.vector_cores, (items + per_pass - 1) / per_pass)};
}

// Maximum number of items that a core of a bookkeeping kernel stages at a time; fits into any unified buffer.
constexpr int64_t kMaxPerPass = 1024;

// Maximum number of tokens for which a core loads block ids at a time.
constexpr int64_t kMaxSlotsPerPass = 512;

}  // namespace ngram_npu::ascendc
