// plan(params, device) plans the launches of each operator. NGRAM_NPU_ASCENDC_OPS(X) calls X(op, Params) for each
// operator with a kernel; launch.cpp and the host twin use it to define the entry points `ngram_npu_ascendc_<op>`.
#pragma once

#include <cstddef>

#include "ascendc/launch_plan.h"
#include "ascendc/ub_layout.h"
#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "core/merging.h"
#include "core/store.h"

namespace ngram_npu::ascendc {

// Returns how the requests are divided among the cores, with as many requests per pass as fit into the unified buffer;
// get_ub_bytes(per_pass) returns the bytes that these need. `per_pass` is 0 if not even one request fits.
template <class GetUbBytes>
CoreTiling split_requests(int64_t items, DeviceProperties device, int64_t max_per_pass,
                          const GetUbBytes& get_ub_bytes) {
  for (; max_per_pass > 0; max_per_pass /= 2) {
    const CoreTiling core_tiling = split_over_cores(items, device, max_per_pass);
    if (can_run(device, get_ub_bytes(core_tiling.per_pass))) return core_tiling;
  }
  return {};
}

// Returns the tiling for drafting, beside `other_bytes` of the unified buffer.
template <class Params>
CoreTiling compute_draft_tiling(const Params& p, int64_t spans, DeviceProperties device, int64_t other_bytes) {
  device.min_items_per_core = 1;  // a single item justifies a core, because it requires reading a row
  return split_requests(p.batch, device, kMaxRequestsPerDraftPass, [&](int64_t per_pass) {
    return other_bytes + ResultsLayout<Params>::ub_bytes(p, per_pass) + SpanMatchesLayout::ub_bytes(spans, per_pass);
  });
}

constexpr int64_t search_ub_bytes(int64_t tile_tokens) {
  return SearcherLayout::ub_bytes(tile_tokens) + MatchWriterLayout::ub_bytes();
}

// Returns the tiling of a lookup. `spans` is 0 if the device cannot run the lookup.
template <class Params>
LookupTiling compute_lookup_tiling(const Params& p, const DeviceProperties& device) {
  const int64_t batch = p.batch, capacity = p.token_ids.capacity;
  // 33 KiB per copy. This number includes the halo, so that a row of n * 8192 tokens has n tiles, not n + 1.
  constexpr int64_t kTileTokens = 8448;
  // More items per core balance rows of different lengths better, but each item adds the latency of its first loads.
  constexpr int64_t kItemsPerCore = 2;
  if (!can_run(device, search_ub_bytes(kTileUnit))) return {};
  LookupTiling tiling{};
  tiling.tile_tokens = kTileTokens;
  while (!can_run(device, search_ub_bytes(tiling.tile_tokens)))
    tiling.tile_tokens = tiling.tile_tokens / 2 / kTileUnit * kTileUnit;
  const int64_t max_spans = smaller(device.vector_cores, larger<int64_t>((capacity + kMinSpan - 1) / kMinSpan, 1));
  tiling.spans = smaller((kItemsPerCore * device.vector_cores + batch - 1) / larger<int64_t>(batch, 1), max_spans);
  if (tiling.spans == 1 || capacity <= tiling.tile_tokens - 2 * kHalo) {
    tiling.requests = compute_draft_tiling(p, 0, device, search_ub_bytes(tiling.tile_tokens));
    if (tiling.requests.per_pass > 0) {
      tiling.launches = tiling.spans = 1;
      tiling.items = tiling.requests;
      return tiling;
    }
  }
  tiling.launches = 2;
  tiling.items = {1, smaller(device.vector_cores, batch * tiling.spans)};
  tiling.requests = compute_draft_tiling(p, tiling.spans, device, 0);
  return tiling.requests.per_pass > 0 ? tiling : LookupTiling{};
}

struct LookupKernels {
  Kernel search_and_draft, search, draft;
};

template <class Params>
LaunchPlan plan_lookup(const Params& p, const DeviceProperties& device, const LookupKernels& kernels) {
  const LookupTiling tiling = compute_lookup_tiling(p, device);
  if (tiling.spans == 0) return {};
  LaunchPlan plan = make_plan(p, tiling);
  if (tiling.launches == 1) {
    plan.add_launch(
        kernels.search_and_draft, tiling.items.cores,
        SearcherLayout::ub_bytes(tiling.tile_tokens) + ResultsLayout<Params>::ub_bytes(p, tiling.requests.per_pass));
    return plan;
  }
  plan.workspace_bytes = p.batch * tiling.spans * kMatchInts * int64_t{sizeof(int32_t)};
  plan.add_launch(kernels.search, tiling.items.cores, search_ub_bytes(tiling.tile_tokens));
  plan.add_launch(kernels.draft, tiling.requests.cores,
                  SpanMatchesLayout::ub_bytes(tiling.spans, tiling.requests.per_pass) +
                      ResultsLayout<Params>::ub_bytes(p, tiling.requests.per_pass));
  return plan;
}

inline LaunchPlan plan(const NgramProposeParams& p, const DeviceProperties& device) {
  return plan_lookup(
      p, device,
      {Kernel::ngram_npu_ngram_propose, Kernel::ngram_npu_ngram_propose_search, Kernel::ngram_npu_ngram_propose_draft});
}

inline LaunchPlan plan(const NgramStepParams& p, const DeviceProperties& device) {
  return plan_lookup(
      p, device,
      {Kernel::ngram_npu_ngram_step, Kernel::ngram_npu_ngram_step_search, Kernel::ngram_npu_ngram_step_draft});
}

// Plans one launch with an item per request. get_ub_bytes(per_pass) returns the bytes that the kernel needs.
template <class Params, class GetUbBytes>
LaunchPlan plan_requests(const Params& p, const DeviceProperties& device, int64_t max_per_pass, Kernel kernel,
                         const GetUbBytes& get_ub_bytes) {
  const CoreTiling requests = split_requests(p.batch, device, max_per_pass, get_ub_bytes);
  if (requests.per_pass == 0) return {};
  LaunchPlan plan = make_plan(p, requests);
  plan.add_launch(kernel, requests.cores, get_ub_bytes(requests.per_pass));
  return plan;
}

inline LaunchPlan plan(const PrepareNextTokenIdsParams& p, const DeviceProperties& device) {
  return plan_requests(p, device, 64, Kernel::ngram_npu_prepare_next_token_ids, [](int64_t per_pass) {
    return int32_ub_bytes(per_pass * kSampledTokensStride) + LocalBufferLayout<uint8_t>::ub_bytes(per_pass) +
           2 * int32_ub_bytes(per_pass);
  });
}

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const DeviceProperties& device) {
  return plan_requests(p, device, kMaxPerPass, Kernel::ngram_npu_prepare_inputs_padded, [](int64_t per_pass) {
    return StagedBatchLayout::ub_bytes(per_pass) + 2 * int32_ub_bytes(per_pass);
  });
}

inline LaunchPlan plan(const PrepareInputsParams& p, const DeviceProperties& device) {
  const BatchTiling tiling{split_over_cores(p.batch + 1, device, kMaxPerPass),
                           split_over_cores(p.total_tokens, device, kMaxPerPass)};
  const int64_t ub_bytes = KeptTokensTileLayout::ub_bytes() + 3 * int32_ub_bytes(tiling.requests.per_pass) +
                           int32_ub_bytes(tiling.tokens.per_pass);
  if (!can_run(device, ub_bytes)) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.add_launch(Kernel::ngram_npu_prepare_inputs, larger(tiling.requests.cores, tiling.tokens.cores), ub_bytes);
  return plan;
}

inline LaunchPlan plan(const PrepareInputIdsParams& p, const DeviceProperties& device) {
  return plan_requests(p, device, 64, Kernel::ngram_npu_prepare_input_ids, [&p](int64_t per_pass) {
    return StagedInputsLayout::ub_bytes(p, per_pass) + InputIdWriterLayout::ub_bytes();
  });
}

inline LaunchPlan plan(const CorrectNumComputedTokensParams& p, const DeviceProperties& device) {
  const BatchTiling tiling{split_over_cores(p.batch, device, kMaxPerPass), {}};
  const CoreTiling& requests = tiling.requests;
  const int64_t ub_bytes = StagedCountsLayout::ub_bytes(p) + CountPassLayout::ub_bytes(requests.per_pass);
  if (!can_run(device, ub_bytes)) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(int32_t)};
  plan.add_launch(Kernel::ngram_npu_correct_num_computed_tokens, requests.cores, ub_bytes);
  plan.add_launch(Kernel::ngram_npu_copy_num_computed_tokens, requests.cores, int32_ub_bytes(requests.per_pass));
  return plan;
}

// Unified buffer bytes for mapping tokens to slots (map_tokens() in correction.cpp).
inline int64_t slot_mapping_ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
  return StagedSlotsLayout::ub_bytes(p, per_pass) + LocalBufferLayout<int64_t>::ub_bytes(per_pass) +
         int32_ub_bytes(per_pass * p.slot_bytes / int64_t{sizeof(int32_t)});
}

inline LaunchPlan plan(const ComputeSlotMappingParams& p, const DeviceProperties& device) {
  const CoreTiling token_tiling = split_over_cores(p.num_slots, device, kMaxSlotsPerPass);
  const int64_t ub_bytes = slot_mapping_ub_bytes(p, token_tiling.per_pass);
  if (!can_run(device, ub_bytes)) return {};
  LaunchPlan plan = make_plan(p, token_tiling);
  plan.add_launch(Kernel::ngram_npu_compute_slot_mapping, token_tiling.cores, ub_bytes);
  return plan;
}

// The second launch of correct_spec_state_ is the copy kernel of correct_num_computed_tokens_. This kernel reads the
// parameters as CorrectNumComputedTokensParams, so `counts` must be the first member.
static_assert(std::is_standard_layout_v<CorrectSpecStateParams> && offsetof(CorrectSpecStateParams, counts) == 0);

inline LaunchPlan plan(const CorrectSpecStateParams& p, const DeviceProperties& device) {
  const int64_t num_tokens = larger(p.slots.num_positions, p.slots.num_slots);
  const BatchTiling tiling{split_over_cores(p.num_seq_lens, device, kMaxSlotsPerPass),
                           split_over_cores(num_tokens, device, kMaxSlotsPerPass)};
  const int64_t ub_bytes = StagedCountsLayout::ub_bytes(p.counts) +
                           slot_mapping_ub_bytes(p.slots, tiling.tokens.per_pass) +
                           RequestPassLayout::ub_bytes(p, tiling.requests.per_pass);
  if (!can_run(device, ub_bytes)) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.counts.batch * int64_t{sizeof(int32_t)};
  plan.add_launch(Kernel::ngram_npu_correct_spec_state, larger(tiling.requests.cores, tiling.tokens.cores), ub_bytes);
  if (p.counts.batch > 0) {
    plan.add_launch(Kernel::ngram_npu_copy_num_computed_tokens, tiling.requests.cores,
                    int32_ub_bytes(tiling.requests.per_pass));
  }
  return plan;
}

inline LaunchPlan plan(const StoreAppendParams& p, const DeviceProperties& device) {
  // A single part justifies a core: cores write to few adjacent addresses.
  const DeviceProperties single_core{smaller<int64_t>(device.vector_cores, 1), device.ub_bytes, 1};
  const DeviceProperties all_cores{device.vector_cores, device.ub_bytes, 1};
  StoreAppendTiling tiling{};
  tiling.requests = split_requests(p.batch, single_core, kMaxPlannedRequests, AppendPlannerLayout::ub_bytes);
  const int64_t max_new = smaller(p.max_new, p.token_ids.capacity);
  tiling.spans = smaller((device.vector_cores + p.batch - 1) / larger<int64_t>(p.batch, 1),
                         larger<int64_t>(max_new / kMinPartTokens, 1));
  const auto get_ub_bytes = [&tiling](int64_t per_pass) {
    return StagedAppendsLayout::ub_bytes(per_pass) + EntryUpdaterLayout::ub_bytes(tiling.tile_tokens) +
           TextWriterLayout::ub_bytes();
  };
  for (tiling.tile_tokens = kMaxTileTokens; tiling.tile_tokens > 0; tiling.tile_tokens /= 2) {
    tiling.parts = split_requests(p.batch * tiling.spans, all_cores, kMaxParts, get_ub_bytes);
    if (tiling.parts.per_pass > 0) break;
  }
  if (tiling.requests.per_pass == 0 || tiling.parts.per_pass == 0) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(StoreAppend)};
  plan.add_launch(Kernel::ngram_npu_store_append, tiling.requests.cores,
                  AppendPlannerLayout::ub_bytes(tiling.requests.per_pass));
  plan.add_launch(Kernel::ngram_npu_store_append_copy, tiling.parts.cores, get_ub_bytes(tiling.parts.per_pass));
  plan.add_launch(Kernel::ngram_npu_store_append_write, tiling.parts.cores, get_ub_bytes(tiling.parts.per_pass));
  return plan;
}

inline LaunchPlan plan(const StoreProposeParams& p, DeviceProperties device) {
  device.min_items_per_core = 1;  // a single lookup justifies a core
  return plan_requests(p, device, kMaxLookups, Kernel::ngram_npu_store_propose, [&p](int64_t per_pass) {
    return StoreLookupsLayout::ub_bytes(per_pass) + StoreDraftsLayout::ub_bytes(p, per_pass);
  });
}

inline LaunchPlan plan(const MergeDraftsParams& p, DeviceProperties device) {
  device.min_items_per_core = smaller<int64_t>(device.min_items_per_core, 8);  // a request waits for several loads
  return plan_requests(p, device, kMaxRequestsPerDraftPass, Kernel::ngram_npu_merge_drafts, [&p](int64_t per_pass) {
    return ProbabilityTableLayout::ub_bytes() + (p.token_bytes == 8
                                                     ? MergedDraftsLayout<int64_t>::ub_bytes(p, per_pass)
                                                     : MergedDraftsLayout<int32_t>::ub_bytes(p, per_pass));
  });
}

}  // namespace ngram_npu::ascendc

#define NGRAM_NPU_ASCENDC_OPS(X)                                  \
  X(compute_slot_mapping_, ComputeSlotMappingParams)              \
  X(correct_num_computed_tokens_, CorrectNumComputedTokensParams) \
  X(correct_spec_state_, CorrectSpecStateParams)                  \
  X(merge_drafts_, MergeDraftsParams)                             \
  X(ngram_propose, NgramProposeParams)                            \
  X(ngram_step_, NgramStepParams)                                 \
  X(prepare_input_ids_, PrepareInputIdsParams)                    \
  X(prepare_inputs, PrepareInputsParams)                          \
  X(prepare_inputs_padded, PrepareInputsPaddedParams)             \
  X(prepare_next_token_ids, PrepareNextTokenIdsParams)            \
  X(store_append_, StoreAppendParams)                             \
  X(store_propose_, StoreProposeParams)
