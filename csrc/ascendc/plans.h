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

// Unified buffer bytes that a core needs for the search: token tiles, the buffers of Searcher, and one match.
constexpr int64_t search_ub_bytes(int64_t tile_tokens) {
  constexpr int64_t kBlockBytes = 32;
  constexpr int64_t kFlagGroup = 64;
  const int64_t word_bytes = tile_tokens / 32 * 4;
  const int64_t num_groups = (tile_tokens / 32 + kFlagGroup - 1) / kFlagGroup;
  const int64_t tile_bytes = kTileBuffers * tile_tokens * 4;
  const int64_t ends_bytes = num_groups * kFlagGroup * 4;
  const int64_t marks_bytes = kBlockBytes + 4 * word_bytes;  // marks_, shifted_marks_, carry_, word_offsets_
  const int64_t flag_bytes = (num_groups * 8 + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  return tile_bytes + ends_bytes + marks_bytes + flag_bytes + kMatchInts * 4;
}

// Unified buffer bytes of a request's draft token ids (Drafter in lookup.h).
template <class Params>
int64_t draft_row_bytes(const Params& p) {
  return (p.lookup.k * p.draft_token_ids.bytes + 31) / 32 * 32;
}

// Unified buffer bytes for drafting in ngram_step_, which needs more than ngram_propose: eight arrays, each rounded up
// to 32 bytes.
inline int64_t draft_ub_bytes(int64_t per_pass, int64_t spans, int64_t row_bytes) {
  return per_pass * (row_bytes + 4 * (spans * kMatchInts + 4 + kSampledTokensStride + kLengthStride)) + 8 * 32;
}

// Returns the tiling for drafting, with as many requests per pass as fit into the unified buffer besides `other_bytes`.
// `cores` is 0 if not even one request fits.
inline CoreTiling compute_draft_tiling(int64_t batch, int64_t spans, int64_t row_bytes, DeviceProperties device,
                                       int64_t other_bytes) {
  device.min_items_per_core = 1;  // a single item justifies a core, because it requires reading a row
  for (int64_t max_per_pass = kMaxRequestsPerDraftPass; max_per_pass > 0; max_per_pass /= 2) {
    const CoreTiling core_tiling = split_over_cores(batch, device, max_per_pass);
    if (can_run(device, other_bytes + draft_ub_bytes(core_tiling.per_pass, spans, row_bytes))) return core_tiling;
  }
  return {};
}

// Returns the tiling of a lookup. `spans` is 0 if the device cannot run the lookup.
inline LookupTiling compute_lookup_tiling(int64_t batch, int64_t capacity, int64_t row_bytes,
                                          const DeviceProperties& device) {
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
    tiling.requests = compute_draft_tiling(batch, 0, row_bytes, device, search_ub_bytes(tiling.tile_tokens));
    if (tiling.requests.per_pass > 0) {
      tiling.launches = tiling.spans = 1;
      tiling.items = tiling.requests;
      return tiling;
    }
  }
  tiling.launches = 2;
  tiling.items = {1, smaller(device.vector_cores, batch * tiling.spans)};
  tiling.requests = compute_draft_tiling(batch, tiling.spans, row_bytes, device, 0);
  return tiling.requests.per_pass > 0 ? tiling : LookupTiling{};
}

struct LookupKernels {
  Kernel search_and_draft, search, draft;
};

template <class Params>
LaunchPlan plan_lookup(const Params& p, const DeviceProperties& device, const LookupKernels& kernels) {
  const LookupTiling tiling = compute_lookup_tiling(p.batch, p.token_ids.capacity, draft_row_bytes(p), device);
  if (tiling.spans == 0) return {};
  LaunchPlan plan = make_plan(p, tiling);
  if (tiling.launches == 1) {
    plan.add_launch(kernels.search_and_draft, tiling.items.cores);
    return plan;
  }
  plan.workspace_bytes = p.batch * tiling.spans * kMatchInts * int64_t{sizeof(int32_t)};
  plan.add_launch(kernels.search, tiling.items.cores);
  plan.add_launch(kernels.draft, tiling.requests.cores);
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

inline LaunchPlan plan(const PrepareNextTokenIdsParams& p, const DeviceProperties& device) {
  constexpr int64_t kRequestInts = kSampledTokensStride + 3;  // sampled tokens, discard, next token, number of tokens
  return plan_requests(p, device, kRequestInts * int64_t{sizeof(int32_t)}, 64,
                       Kernel::ngram_npu_prepare_next_token_ids);
}

inline LaunchPlan plan(const PrepareInputsPaddedParams& p, const DeviceProperties& device) {
  return plan_requests(p, device, 5 * int64_t{sizeof(int32_t)}, kMaxPerPass, Kernel::ngram_npu_prepare_inputs_padded);
}

inline LaunchPlan plan(const PrepareInputsParams& p, const DeviceProperties& device) {
  if (!can_run(device, (kMaxPerPass * 4 + kRequestsPerTile * 3) * int64_t{sizeof(int32_t)})) return {};
  const BatchTiling tiling{split_over_cores(p.batch + 1, device, kMaxPerPass),
                           split_over_cores(p.total_tokens, device, kMaxPerPass)};
  LaunchPlan plan = make_plan(p, tiling);
  plan.add_launch(Kernel::ngram_npu_prepare_inputs, larger(tiling.requests.cores, tiling.tokens.cores));
  return plan;
}

inline LaunchPlan plan(const PrepareInputIdsParams& p, const DeviceProperties& device) {
  constexpr int64_t kMaxRequests = 64;
  constexpr int64_t kRequestInts = 2;  // offset, number of drafts
  const CoreTiling requests = split_over_cores(p.batch, device, kMaxRequests);
  const int64_t row_ints = (smaller(p.draft_token_ids.capacity, kMaxDraftTokens) + 7) / 8 * 8;
  const int64_t pass_ints = requests.per_pass * (kRequestInts + row_ints) + 4 * 8 + kCopiesPerWait * kInputIdsPerCopy;
  const int64_t random_access_array_bytes =
      random_access_bytes(p.prev_positions, p.batch) + random_access_bytes(p.draft_token_ids.rows, 4);
  if (!can_run(device, random_access_array_bytes + pass_ints * int64_t{sizeof(int32_t)})) return {};
  LaunchPlan plan = make_plan(p, requests);
  plan.add_launch(Kernel::ngram_npu_prepare_input_ids, requests.cores);
  return plan;
}

// Unified buffer bytes of a GatherSource (gather.h).
inline int64_t gather_source_ub_bytes(int64_t size) {
  return smaller(size, kMaxStagedItems) * int64_t{sizeof(int32_t)} + 32;
}
// Unified buffer bytes of PreviousCounts (counts.h).
inline int64_t previous_counts_ub_bytes(const CorrectNumComputedTokensParams& p) {
  return 3 * gather_source_ub_bytes(p.num_previous);
}
// Unified buffer bytes of a PassIndices (gather.h).
inline int64_t pass_indices_ub_bytes(const IndexArray& indices, int64_t per_pass) {
  return per_pass * (4 + (indices.bytes == 8 ? 8 : 0)) + 2 * 32;
}
// Unified buffer bytes of a CountCorrector (counts.h).
inline int64_t count_corrector_ub_bytes(const CorrectNumComputedTokensParams& p, int64_t per_pass) {
  return pass_indices_ub_bytes(p.prev_positions, per_pass) + 7 * (per_pass * 4 + 32);
}
// Unified buffer bytes of a RequestPass (correction.cpp) without its CountCorrector and its GatherSource.
inline int64_t request_pass_ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
  constexpr int64_t kFlagBytes = 2 + 1;  // one half and one byte per request
  return pass_indices_ub_bytes(p.row_indices, per_pass) + 6 * (per_pass * 4 + 32) + per_pass * kFlagBytes + 2 * 32;
}
// Unified buffer bytes of StagedSlots and of the windows of positions and slots (slots.h).
inline int64_t staged_slots_ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
  constexpr int64_t kBytesPerSlot = 32 + 2 * int64_t{sizeof(int64_t)};
  return random_access_bytes(p.batch + 1, 4) + random_access_bytes(p.row_indices, p.batch) + per_pass * kBytesPerSlot +
         2 * 32;
}

inline LaunchPlan plan(const CorrectNumComputedTokensParams& p, const DeviceProperties& device) {
  const BatchTiling tiling{split_over_cores(p.batch, device, kMaxPerPass), {}};
  if (!can_run(device, previous_counts_ub_bytes(p) + count_corrector_ub_bytes(p, tiling.requests.per_pass))) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(int32_t)};
  plan.add_launch(Kernel::ngram_npu_correct_num_computed_tokens, tiling.requests.cores);
  plan.add_launch(Kernel::ngram_npu_copy_num_computed_tokens, tiling.requests.cores);
  return plan;
}

inline LaunchPlan plan(const ComputeSlotMappingParams& p, const DeviceProperties& device) {
  const CoreTiling token_tiling = split_over_cores(p.num_slots, device, kMaxSlotsPerPass);
  if (!can_run(device, staged_slots_ub_bytes(p, token_tiling.per_pass))) return {};
  LaunchPlan plan = make_plan(p, token_tiling);
  plan.add_launch(Kernel::ngram_npu_compute_slot_mapping, token_tiling.cores);
  return plan;
}

// The second launch of correct_spec_state_ is the copy kernel of correct_num_computed_tokens_. This kernel reads the
// parameters as CorrectNumComputedTokensParams, so `counts` must be the first member.
static_assert(std::is_standard_layout_v<CorrectSpecStateParams> && offsetof(CorrectSpecStateParams, counts) == 0);

inline LaunchPlan plan(const CorrectSpecStateParams& p, const DeviceProperties& device) {
  const int64_t num_tokens = larger(p.slots.num_positions, p.slots.num_slots);
  const BatchTiling tiling{split_over_cores(p.num_seq_lens, device, kMaxSlotsPerPass),
                           split_over_cores(num_tokens, device, kMaxSlotsPerPass)};
  const int64_t per_pass = tiling.requests.per_pass;
  const int64_t request_bytes = count_corrector_ub_bytes(p.counts, per_pass) + request_pass_ub_bytes(p.slots, per_pass);
  const int64_t token_bytes = count_corrector_ub_bytes(p.counts, smaller(p.counts.batch, kMaxCorrectedRequests)) +
                              staged_slots_ub_bytes(p.slots, tiling.tokens.per_pass);
  const int64_t gather_bytes = previous_counts_ub_bytes(p.counts) + gather_source_ub_bytes(p.num_rows);
  if (!can_run(device, request_bytes + token_bytes + gather_bytes)) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.counts.batch * int64_t{sizeof(int32_t)};
  plan.add_launch(Kernel::ngram_npu_correct_spec_state, larger(tiling.requests.cores, tiling.tokens.cores));
  if (p.counts.batch > 0) plan.add_launch(Kernel::ngram_npu_copy_num_computed_tokens, tiling.requests.cores);
  return plan;
}

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

inline LaunchPlan plan(const StoreAppendParams& p, const DeviceProperties& device) {
  // A single part justifies a core: cores write to few adjacent addresses.
  const DeviceProperties single_core{smaller<int64_t>(device.vector_cores, 1), device.ub_bytes, 1};
  const DeviceProperties all_cores{device.vector_cores, device.ub_bytes, 1};
  StoreAppendTiling tiling{};
  tiling.requests = split_requests(p.batch, single_core, kMaxPlannedRequests, AppendPlannerLayout::ub_bytes);
  const int64_t max_new = smaller(p.max_new, p.token_ids.capacity);
  tiling.spans = smaller((device.vector_cores + p.batch - 1) / larger<int64_t>(p.batch, 1),
                         larger<int64_t>(max_new / kMinPartTokens, 1));
  for (tiling.tile_tokens = kMaxTileTokens; tiling.tile_tokens > 0; tiling.tile_tokens /= 2) {
    const int64_t tile_bytes = EntryUpdaterLayout::ub_bytes(tiling.tile_tokens) + TextWriterLayout::ub_bytes();
    tiling.parts = split_requests(p.batch * tiling.spans, all_cores, kMaxParts, [&](int64_t per_pass) {
      return tile_bytes + StagedAppendsLayout::ub_bytes(per_pass);
    });
    if (tiling.parts.per_pass > 0) break;
  }
  if (tiling.requests.per_pass == 0 || tiling.parts.per_pass == 0) return {};
  LaunchPlan plan = make_plan(p, tiling);
  plan.workspace_bytes = p.batch * int64_t{sizeof(StoreAppend)};
  plan.add_launch(Kernel::ngram_npu_store_append, tiling.requests.cores);
  plan.add_launch(Kernel::ngram_npu_store_append_copy, tiling.parts.cores);
  plan.add_launch(Kernel::ngram_npu_store_append_write, tiling.parts.cores);
  return plan;
}

inline LaunchPlan plan(const StoreProposeParams& p, DeviceProperties device) {
  device.min_items_per_core = 1;  // a single lookup justifies a core
  const CoreTiling requests = split_requests(p.batch, device, kMaxLookups, [&](int64_t per_pass) {
    return StoreLookupsLayout::ub_bytes(per_pass) + StoreDraftsLayout::ub_bytes(p, per_pass);
  });
  if (requests.per_pass == 0) return {};
  LaunchPlan plan = make_plan(p, requests);
  plan.add_launch(Kernel::ngram_npu_store_propose, requests.cores);
  return plan;
}

inline LaunchPlan plan(const MergeDraftsParams& p, const DeviceProperties& device) {
  const CoreTiling requests = split_requests(p.batch, device, kMaxRequestsPerDraftPass, [&](int64_t per_pass) {
    const int64_t draft_bytes = p.token_bytes == 8 ? MergedDraftsLayout<int64_t>::ub_bytes(p, per_pass)
                                                   : MergedDraftsLayout<int32_t>::ub_bytes(p, per_pass);
    return ProbabilityTableLayout::ub_bytes() + draft_bytes;
  });
  if (requests.per_pass == 0) return {};
  LaunchPlan plan = make_plan(p, requests);
  plan.add_launch(Kernel::ngram_npu_merge_drafts, requests.cores);
  return plan;
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
