// The unified buffer bytes of the kernels' classes that own buffers. The host plans with these sizes (plans.h), but it
// cannot compile the classes, so each class inherits ub_bytes() from its layout. The twin checks that no kernel
// allocates more than the planned bytes.
#pragma once

#include "ascendc/launch_args.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "core/merging.h"
#include "core/store.h"

namespace ngram_npu::ascendc {

constexpr int64_t kUnitBytes = 32;  // operands of instructions begin at multiples of this number
constexpr int64_t kUnitItems = kUnitBytes / int64_t{sizeof(int32_t)};

// The number of items of whole units.
template <class T>
NGRAM_FN constexpr int64_t round_up_items(int64_t count) {
  constexpr int64_t kItems = kUnitBytes / int64_t{sizeof(T)};
  return (count + kItems - 1) / kItems * kItems;
}

template <class T>
struct LocalBufferLayout {
  NGRAM_FN static constexpr int64_t ub_bytes(int64_t capacity) {
    return round_up_items<T>(capacity > 0 ? capacity : 1) * int64_t{sizeof(T)};
  }
};

NGRAM_FN constexpr int64_t int32_ub_bytes(int64_t capacity) { return LocalBufferLayout<int32_t>::ub_bytes(capacity); }

template <class T>
struct RandomAccessArrayLayout {
  static constexpr int64_t ub_bytes(int64_t size) {
    return LocalBufferLayout<T>::ub_bytes(size <= kMaxStagedItems ? size : 0);
  }
};

struct RandomAccessIndicesLayout {
  static constexpr int64_t ub_bytes(const IndexArray& indices, int64_t size) {
    return RandomAccessArrayLayout<int32_t>::ub_bytes(indices.bytes == 4 ? size : 0) +
           RandomAccessArrayLayout<int64_t>::ub_bytes(indices.bytes == 8 ? size : 0);
  }
};

struct ScatteredLoadsLayout {
  static constexpr int64_t ub_bytes(int64_t capacity) { return int32_ub_bytes(capacity * kUnitItems); }
};

struct StagedDraftRowsLayout {
  static constexpr int64_t ub_bytes(const DraftRows& rows, int64_t k, int64_t per_pass) {
    return int32_ub_bytes(per_pass * round_up_items<int32_t>(k * rows.bytes / int64_t{sizeof(int32_t)}));
  }
};

// Correcting (slots.h, correction.cpp).

struct StagedCountsLayout {
  static constexpr int64_t ub_bytes(const CorrectNumComputedTokensParams& p) {
    return RandomAccessIndicesLayout::ub_bytes(p.prev_positions, p.batch) +
           3 * RandomAccessArrayLayout<int32_t>::ub_bytes(p.num_previous) +
           RandomAccessArrayLayout<int32_t>::ub_bytes(p.batch);
  }
};

struct CountPassLayout {
  static constexpr int64_t ub_bytes(int64_t per_pass) { return 2 * int32_ub_bytes(per_pass); }
};

struct StagedSlotsLayout {
  static constexpr int64_t ub_bytes(const ComputeSlotMappingParams& p, int64_t per_pass) {
    return RandomAccessArrayLayout<int32_t>::ub_bytes(p.batch + 1) +
           RandomAccessIndicesLayout::ub_bytes(p.row_indices, p.batch) + ScatteredLoadsLayout::ub_bytes(per_pass);
  }
};

struct RequestPassLayout {
  static constexpr int64_t ub_bytes(const CorrectSpecStateParams& p, int64_t per_pass) {
    return RandomAccessArrayLayout<int32_t>::ub_bytes(p.num_rows) + CountPassLayout::ub_bytes(per_pass) +
           int32_ub_bytes(per_pass) + LocalBufferLayout<uint8_t>::ub_bytes(per_pass);
  }
};

// Sampled tokens and the drafter's batch (bookkeeping.cpp).

struct StagedBatchLayout {
  static constexpr int64_t ub_bytes(int64_t per_pass) {
    return 2 * int32_ub_bytes(per_pass + 1) + int32_ub_bytes(per_pass);
  }
};

struct KeptTokensTileLayout {
  static constexpr int64_t ub_bytes() { return 3 * int32_ub_bytes(kRequestsPerTile); }
};

struct StagedInputsLayout {
  static constexpr int64_t ub_bytes(const PrepareInputIdsParams& p, int64_t per_pass) {
    const int64_t num_staged = smaller(p.draft_token_ids.capacity, kMaxDraftTokens);
    return int32_ub_bytes(per_pass + 1) + int32_ub_bytes(per_pass) +
           RandomAccessIndicesLayout::ub_bytes(p.prev_positions, p.batch) +
           RandomAccessArrayLayout<int32_t>::ub_bytes(p.draft_token_ids.rows) +
           int32_ub_bytes(per_pass * round_up_items<int32_t>(num_staged));
  }
};

struct InputIdWriterLayout {
  static constexpr int64_t ub_bytes() { return int32_ub_bytes(kCopiesPerWait * kInputIdsPerCopy); }
};

// The lookup (lookup.h, drafting.cpp).

struct SearcherLayout {
  static constexpr int32_t kWordPositions = 32;  // positions of a tile per word
  static constexpr int32_t kBlockWords = 8;      // words in a block of 32 bytes
  static constexpr int32_t kFlagGroup = 64;      // words per comparison
  static constexpr int64_t ub_bytes(int64_t tile_tokens) {
    const int64_t num_words = tile_tokens / kWordPositions;
    const int64_t num_groups = (num_words + kFlagGroup - 1) / kFlagGroup;
    return kTileBuffers * int32_ub_bytes(tile_tokens) + int32_ub_bytes(num_groups * kFlagGroup) +
           int32_ub_bytes(kBlockWords + num_words) + 3 * int32_ub_bytes(num_words) +
           LocalBufferLayout<uint64_t>::ub_bytes(num_groups);
  }
};

struct MatchWriterLayout {
  static constexpr int64_t ub_bytes() { return int32_ub_bytes(kMatchInts); }
};

struct SpanMatchesLayout {
  static constexpr int64_t ub_bytes(int64_t spans, int64_t per_pass) {
    return int32_ub_bytes(per_pass * spans * kMatchInts);
  }
};

struct DrafterLayout {
  template <class Params>
  static constexpr int64_t ub_bytes(const Params& p, int64_t per_pass) {
    return StagedDraftRowsLayout::ub_bytes(p.draft_token_ids, p.lookup.k, per_pass) + 2 * int32_ub_bytes(per_pass);
  }
};

struct AppenderLayout {
  static constexpr int64_t ub_bytes(int64_t per_pass) {
    return int32_ub_bytes(per_pass * kSampledTokensStride) + int32_ub_bytes(per_pass * kLengthStride);
  }
};

template <class Params>
struct ResultsLayout;
template <>
struct ResultsLayout<NgramProposeParams> {
  static constexpr int64_t ub_bytes(const NgramProposeParams& p, int64_t per_pass) {
    return DrafterLayout::ub_bytes(p, per_pass);
  }
};
template <>
struct ResultsLayout<NgramStepParams> {
  static constexpr int64_t ub_bytes(const NgramStepParams& p, int64_t per_pass) {
    return DrafterLayout::ub_bytes(p, per_pass) + AppenderLayout::ub_bytes(per_pass) + 2 * int32_ub_bytes(per_pass);
  }
};

// The store (store.cpp).

struct StagedAppendsLayout {
  static constexpr int64_t ub_bytes(int64_t capacity) { return int32_ub_bytes(capacity * kStoreAppendWords); }
};

struct AppendPlannerLayout {
  static constexpr int64_t ub_bytes(int64_t per_pass) {
    return StagedAppendsLayout::ub_bytes(per_pass) + int32_ub_bytes(per_pass * store::kSlotWords) +
           int32_ub_bytes(per_pass * store::kMaxSize) + int32_ub_bytes(per_pass * store::kHeadWords) +
           int32_ub_bytes(store::kAllocatorWords);
  }
};

struct EntryUpdaterLayout {
  static constexpr int64_t ub_bytes(int64_t tile_tokens) {
    return int32_ub_bytes(store::kMaxSize + tile_tokens) + 2 * int32_ub_bytes(tile_tokens * store::kSizes * kUnitItems);
  }
};

struct TextWriterLayout {
  static constexpr int64_t ub_bytes() {
    return 2 * int32_ub_bytes(store::kBlockTokens) + int32_ub_bytes(store::kHeadWords + store::kSlotWords);
  }
};

struct StoreLookupsLayout {
  static constexpr int64_t ub_bytes(int64_t per_pass) {
    return int32_ub_bytes(per_pass * store::kMaxSize) + int32_ub_bytes(per_pass * store::kSizes * kUnitItems) +
           int32_ub_bytes(per_pass * store::kSizes * store::kEntryWords * store::kMaxSize);
  }
};

struct StoreDraftsLayout {
  static constexpr int64_t ub_bytes(const StoreProposeParams& p, int64_t per_pass) {
    return StagedDraftRowsLayout::ub_bytes(p.draft_token_ids, p.k, per_pass) + 3 * int32_ub_bytes(per_pass);
  }
};

// merge_drafts_ (merging.cpp).

struct ProbabilityTableLayout {
  static constexpr int64_t kCosts = 256;
  static constexpr int64_t ub_bytes() { return int32_ub_bytes(kCosts); }
};

template <class Token>
struct MergedDraftsLayout {
  static constexpr int64_t ub_bytes(const MergeDraftsParams& p, int64_t per_pass) {
    return LocalBufferLayout<Token>::ub_bytes(per_pass * round_up_items<Token>(p.ngram_draft_token_ids.capacity)) +
           2 * int32_ub_bytes(per_pass) + int32_ub_bytes(per_pass * kUnitItems);
  }
};

}  // namespace ngram_npu::ascendc
