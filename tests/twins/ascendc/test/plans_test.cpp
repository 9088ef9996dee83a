// Tests the launch plans of the AscendC kernels (csrc/ascendc/plans.h), for sizes that the parity suite does not reach.
#include "ascendc/plans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace ngram_npu::ascendc {
namespace {

constexpr int64_t kUbOf910B = 192 * 1024;
constexpr int64_t kCores[] = {1, 2, 7, 40, 48, 50};
constexpr int64_t kCounts[] = {1, 2, 7, 8, 47, 48, 49, 128, 1023, 1024, 1025, 50'000};

// Returns parameters for `count` requests, and as many tokens.
template <class Params>
Params make_params(int64_t count) {
  Params p{};
  if constexpr (std::is_same_v<Params, CorrectSpecStateParams>) {
    p.counts.batch = p.num_seq_lens = p.slots.num_positions = p.slots.num_slots = count;
  } else if constexpr (std::is_same_v<Params, ComputeSlotMappingParams>) {
    p.num_slots = count;
  } else {
    p.batch = count;
  }
  if constexpr (std::is_same_v<Params, PrepareInputsParams>) p.total_tokens = count;
  if constexpr (std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>) {
    p.token_ids.capacity = 4096;
    p.lookup.k = 8;
    p.draft_token_ids = {nullptr, p.lookup.k, sizeof(int32_t)};
  }
  if constexpr (std::is_same_v<Params, StoreAppendParams>) {
    p.token_ids.capacity = 4096;
    p.max_new = 9;
  }
  return p;
}

template <class Params>
LaunchPlan make_valid_plan(const Params& params, int64_t cores) {
  const LaunchPlan result = plan(params, {cores, kUbOf910B});
  EXPECT_EQ(result.status, kOk);
  for (int32_t i = 0; i < result.num_launches; ++i) {
    EXPECT_GE(result.launches[i].blocks, 1u);
    EXPECT_LE(result.launches[i].blocks, cores);
    EXPECT_LE(result.launches[i].ub_bytes, kUbOf910B - kReservedUbBytes);
  }
  return result;
}

template <class Tiling>
Tiling get_tiling(const LaunchPlan& launch_plan) {
  Tiling tiling;
  std::memcpy(&tiling, launch_plan.args.tiling, sizeof(tiling));
  return tiling;
}

// Expects that each item is processed by one core of a launch with this number of blocks.
void expect_one_core_per_item(const CoreTiling& tiling, int64_t blocks, int64_t items) {
  std::vector<int> num_cores(static_cast<size_t>(items));
  for (int64_t core = 0; core < std::min(tiling.cores, blocks); ++core) {
    for (int64_t first = core * tiling.per_pass; first < items; first += tiling.cores * tiling.per_pass) {
      for (int64_t i = first; i < std::min(first + tiling.per_pass, items); ++i) ++num_cores[static_cast<size_t>(i)];
    }
  }
  EXPECT_EQ(std::count(num_cores.begin(), num_cores.end(), 1), items) << tiling.cores << " cores, " << blocks;
}

template <class Params>
void expect_plan_unless_cores_or_memory_are_missing(const char* op) {
  SCOPED_TRACE(op);
  const auto params = make_params<Params>(3);
  EXPECT_GE(make_valid_plan(params, 48).num_launches, 1);
  const DeviceProperties unusable[] = {{0, kUbOf910B}, {-1, kUbOf910B}, {48, 0}, {48, 1000}};
  for (const DeviceProperties& device : unusable) {
    EXPECT_NE(plan(params, device).status, kOk) << device.vector_cores << " cores, " << device.ub_bytes;
  }
}

TEST(Plans, OperatorHasPlanUnlessCoresOrMemoryAreMissing) {
#define NGRAM_NPU_EXPECT_PLAN(op, Params) expect_plan_unless_cores_or_memory_are_missing<Params>(#op);
  NGRAM_NPU_ASCENDC_OPS(NGRAM_NPU_EXPECT_PLAN)
#undef NGRAM_NPU_EXPECT_PLAN
}

// get_items(tiling) returns the part of the operator's tiling that divides the `count` requests or tokens of the last
// launch.
template <class Params, class Tiling, class GetItems>
void expect_one_core_per_item_of_operator(const GetItems& get_items) {
  for (const int64_t cores : kCores) {
    for (const int64_t count : kCounts) {
      const LaunchPlan result = make_valid_plan(make_params<Params>(count), cores);
      const Launch& last_launch = result.launches[result.num_launches - 1];
      expect_one_core_per_item(get_items(get_tiling<Tiling>(result)), last_launch.blocks, count);
    }
  }
}

TEST(Plans, ItemIsAssignedToOneCore) {
  const auto all = [](const CoreTiling& tiling) { return tiling; };
  const auto requests = [](const auto& tiling) { return tiling.requests; };
  const auto tokens = [](const BatchTiling& tiling) { return tiling.tokens; };
  expect_one_core_per_item_of_operator<PrepareInputsPaddedParams, CoreTiling>(all);
  expect_one_core_per_item_of_operator<PrepareInputIdsParams, CoreTiling>(all);
  expect_one_core_per_item_of_operator<ComputeSlotMappingParams, CoreTiling>(all);
  expect_one_core_per_item_of_operator<PrepareInputsParams, BatchTiling>(tokens);
  expect_one_core_per_item_of_operator<CorrectSpecStateParams, BatchTiling>(requests);
  expect_one_core_per_item_of_operator<NgramStepParams, LookupTiling>(requests);
}

TEST(Plans, PartOfAnAppendIsAssignedToOneCore) {
  for (const int64_t cores : kCores) {
    for (const int64_t batch : kCounts) {
      for (const int64_t max_new : {1, 5, 256}) {
        auto params = make_params<StoreAppendParams>(batch);
        params.max_new = max_new;
        const LaunchPlan result = make_valid_plan(params, cores);
        const auto tiling = get_tiling<StoreAppendTiling>(result);
        EXPECT_EQ(result.launches[0].blocks, 1u);
        EXPECT_EQ(result.launches[1].blocks, tiling.parts.cores);
        EXPECT_EQ(result.launches[2].blocks, tiling.parts.cores);
        EXPECT_GE(tiling.spans, 1);
        EXPECT_LE(tiling.spans, std::max<int64_t>(1, max_new / kMinPartTokens));
        expect_one_core_per_item(tiling.parts, result.launches[1].blocks, batch * tiling.spans);
        EXPECT_EQ(result.workspace_bytes, 32 * batch);
      }
    }
    auto single_request = make_params<StoreAppendParams>(1);
    single_request.max_new = 1024;
    EXPECT_EQ(get_tiling<StoreAppendTiling>(make_valid_plan(single_request, cores)).spans, cores);
  }
}

TEST(Plans, EmptyBatchNeedsNoLaunch) {
  EXPECT_EQ(make_valid_plan(make_params<NgramProposeParams>(0), 48).num_launches, 0);
  EXPECT_EQ(make_valid_plan(make_params<NgramStepParams>(0), 48).num_launches, 0);
  EXPECT_EQ(make_valid_plan(make_params<PrepareNextTokenIdsParams>(0), 48).num_launches, 0);
  EXPECT_EQ(make_valid_plan(make_params<PrepareInputIdsParams>(0), 48).num_launches, 0);
  EXPECT_EQ(make_valid_plan(make_params<ComputeSlotMappingParams>(0), 48).num_launches, 0);
  // prepare_inputs always writes the first element of query_start_loc_out, which is 0.
  EXPECT_EQ(make_valid_plan(make_params<PrepareInputsParams>(0), 48).num_launches, 1);
}

template <class Params>
void expect_valid_lookup_plan(int64_t cores, int64_t batch, int64_t capacity) {
  SCOPED_TRACE(testing::Message() << cores << " cores, " << batch << " rows of " << capacity);
  constexpr int64_t kMaxTileTokens = 8448;
  auto params = make_params<Params>(batch);
  params.token_ids.capacity = capacity;
  const LaunchPlan result = make_valid_plan(params, cores);
  const auto tiling = get_tiling<LookupTiling>(result);
  EXPECT_GE(tiling.spans, 1);
  EXPECT_LE(tiling.spans, std::max<int64_t>(1, std::min(cores, (capacity + kMinSpan - 1) / kMinSpan)));
  EXPECT_EQ(tiling.launches, result.num_launches);
  EXPECT_EQ(tiling.items.cores, result.launches[0].blocks);
  if (tiling.launches == 1) {  // one core reads a row, because there are enough rows or a row fits in a tile
    EXPECT_EQ(tiling.spans, 1);
    EXPECT_EQ(tiling.items.per_pass, tiling.requests.per_pass);
    EXPECT_EQ(tiling.items.cores, tiling.requests.cores);
    EXPECT_EQ(result.workspace_bytes, 0);
    return;
  }
  EXPECT_GT(capacity, kMaxTileTokens - 2 * kHalo);
  EXPECT_LT(batch, 2 * cores);
  EXPECT_EQ(tiling.items.per_pass, 1);
  EXPECT_EQ(tiling.items.cores, std::min(cores, batch * tiling.spans));
  EXPECT_EQ(result.workspace_bytes, batch * tiling.spans * 32);
}

TEST(Plans, SpansOfALookupFollowCoresAndSizes) {
  for (const int64_t cores : kCores) {
    for (const int64_t batch : kCounts) {
      for (const int64_t capacity : {0, 1, 1023, 1024, 1025, 32 * 1024, 128 * 1024, INT32_MAX}) {
        expect_valid_lookup_plan<NgramProposeParams>(cores, batch, capacity);
        expect_valid_lookup_plan<NgramStepParams>(cores, batch, capacity);
      }
    }
    auto single_row = make_params<NgramProposeParams>(1);
    single_row.token_ids.capacity = 128 * 1024;
    EXPECT_EQ(get_tiling<LookupTiling>(make_valid_plan(single_row, cores)).items.cores, cores);
  }
}

}  // namespace
}  // namespace ngram_npu::ascendc
