// The unified buffer bytes of the kernels' classes that own buffers. The host plans with these sizes (plans.h), but it
// cannot compile the classes, so each class inherits ub_bytes() from its layout. The twin checks that a kernel
// allocates exactly the planned bytes.
#pragma once

#include "ascendc/launch_args.h"
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

struct StagedDraftRowsLayout {
  static constexpr int64_t ub_bytes(const DraftRows& rows, int64_t k, int64_t per_pass) {
    return int32_ub_bytes(per_pass * round_up_items<int32_t>(k * rows.bytes / int64_t{sizeof(int32_t)}));
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
