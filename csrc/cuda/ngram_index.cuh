// The index's hash table as one warp sees it: finding a gram, and noting where it occurs. What the tensor contains:
// core/ngram_index_device_layout.h; why the answers are a scan's: docs/design/index.md.
#pragma once

#include "core/lookup_rules.h"
#include "core/ngram_index_device_layout.h"
#include "cuda/launch.cuh"

namespace ngram_npu::cuda {

using namespace device_index;

__device__ inline uint32_t lane_id() { return threadIdx.x % kWarpSize; }

// Whether the n tokens up to a and up to b are the same, found out by a warp together; a, b >= n - 1.
__device__ inline bool same_gram(const int32_t* tokens, uint32_t a, uint32_t b, uint32_t n) {
  bool same = true;
  for (uint32_t j = lane_id(); j < n; j += kWarpSize) same = same && tokens[a - j] == tokens[b - j];
  return __all_sync(kWholeWarp, same);
}

__device__ inline bool better(uint32_t end, uint32_t than, int32_t match_policy) {
  return match_policy == kEarliest ? end < than : end > than;
}

// One row and the slot that indexes it.
struct SlotGrams {
  Table table;
  const int32_t* tokens;
  uint32_t slot;
  uint32_t tenant;
  int32_t match_policy;

  // Where this lane looks: the first 16 lanes in one bucket, the others in the other.
  __device__ volatile unsigned long long* at(const Place& place) const {
    const uint32_t lane = lane_id();
    const uint32_t bucket = lane < kBucketEntries ? place.bucket[0] : place.bucket[1];
    return table.entries + (static_cast<int64_t>(bucket) * kBucketEntries + lane % kBucketEntries);
  }

  // The earliest or latest recorded end below `limit` of the gram of n tokens that ends at `end`: every entry is held
  // against the row's tokens. Two threads may have entered one gram twice, so all that agree count. Returns `limit`
  // where there is none. In *holder the lane whose entry it is.
  __device__ uint32_t find(const Place& place, uint64_t entry, uint32_t end, uint32_t n, uint32_t limit,
                           uint32_t* holder) const {
    const uint32_t recorded = end_of(entry);
    uint32_t candidates =
        __ballot_sync(kWholeWarp, head_of(entry) == place.head && recorded < limit && recorded >= n - 1);
    uint32_t found = limit;
    for (; candidates != 0; candidates &= candidates - 1) {
      const uint32_t lane = static_cast<uint32_t>(__ffs(static_cast<int>(candidates)) - 1);
      const uint32_t other = __shfl_sync(kWholeWarp, recorded, static_cast<int>(lane));
      if ((found == limit || better(other, found, match_policy)) && same_gram(tokens, other, end, n)) {
        found = other;
        *holder = lane;
      }
    }
    return found;
  }

  // Notes that the gram of n tokens that ends at `end` occurs there; of what is recorded at or above `limit`, which may
  // be a former generation's, nothing is believed. *added counts new entries. False: both buckets are full.
  __device__ bool insert(const Place& place, uint32_t end, uint32_t n, uint32_t limit, uint32_t* added) const {
    volatile unsigned long long* const mine = at(place);
    const uint32_t lane = lane_id();
    for (;;) {
      const unsigned long long entry = *mine;
      uint32_t chosen = 0;
      const uint32_t found = find(place, entry, end, n, limit, &chosen);
      const bool is_new = found == limit;
      if (!is_new && !better(end, found, match_policy)) return true;
      if (is_new) {
        uint32_t free = __ballot_sync(kWholeWarp, entry == 0);
        if (free == 0) free = __ballot_sync(kWholeWarp, is_dead(table, entry, table.generations));
        if (free == 0) return false;
        // The emptier bucket's first.
        const uint32_t first = free & 0xffffu, second = free >> 16;
        chosen = static_cast<uint32_t>(__popc(first) >= __popc(second) ? __ffs(static_cast<int>(first)) - 1
                                                                       : __ffs(static_cast<int>(second)) + 15);
      }
      // Only over what was seen there: another slot's entry is never lost, whatever happens meanwhile.
      const bool done = lane == chosen &&
                        atomicCAS(const_cast<unsigned long long*>(mine), entry, make_entry(place.head, end)) == entry;
      if (__any_sync(kWholeWarp, done)) {
        if (is_new) ++*added;
        return true;
      }
    }
  }
};

// How a slot stands to the row it is to index.
enum class SlotState : int {
  kUsable,   // what it holds is this row's
  kEmpty,    // nothing in it yet
  kRetry,    // given up, but there is room again: empty
  kGivenUp,  // given up: to be scanned
  kOptions,  // it holds something else, and is to be emptied
  kLength,
  kTokens,
};

struct SlotView {
  SlotState state;
  uint32_t indexed;
};

// Found out by a warp, from one look at the slot's words, `word` this lane's: were the slot given to two requests at
// once, against the contract, all lanes would still agree. `known`: so many ends it may have indexed.
__device__ inline SlotView view_slot(const Table& table, uint32_t word, uint32_t options, const int32_t* tokens,
                                     uint32_t known) {
  const uint32_t lane = lane_id() % kSlotWords;
  const uint32_t held_options = __shfl_sync(kWholeWarp, word, kSlotOptions);
  const uint32_t indexed = __shfl_sync(kWholeWarp, word, kSlotIndexed);
  const uint32_t given_up = __shfl_sync(kWholeWarp, word, kSlotGivenUp);
  if (held_options == 0) return {SlotState::kEmpty, 0};
  if (held_options != options) return {SlotState::kOptions, 0};
  if (indexed > known) return {SlotState::kLength, 0};
  const uint32_t back = kSlotTail + kTailTokens - lane;  // 1: the newest
  const bool agrees = lane < kSlotTail || back > indexed || word == static_cast<uint32_t>(tokens[indexed - back]);
  if (!__all_sync(kWholeWarp, agrees)) return {SlotState::kTokens, 0};
  if (given_up == 0) return {SlotState::kUsable, indexed};
  const volatile uint32_t* header = table.header;
  const uint32_t entries = __shfl_sync(kWholeWarp, header[kHeaderEntries], 0);
  return {has_room(table, entries, given_up) ? SlotState::kRetry : SlotState::kGivenUp, 0};
}

__device__ inline void count(const Table& table, Header statistic) { atomicAdd(table.header + statistic, 1u); }

// Makes the slot's entries dead. After it nothing may be entered for the slot in the same launch: another block could
// know the former generation still, and hold the new entries for dead.
__device__ inline void drop_entries(const Table& table, uint32_t slot_id) {
  uint32_t* slot = table.slot(slot_id);
  atomicAdd(table.generations + slot_id, 1u);
  atomicAdd(table.header + kHeaderEntries, 0u - slot[kSlotHeld]);
  slot[kSlotHeld] = 0;
}

__device__ inline void empty_slot(const Table& table, uint32_t slot_id, SlotState why) {
  drop_entries(table, slot_id);
  table.slot(slot_id)[kSlotIndexed] = 0;
  table.slot(slot_id)[kSlotGivenUp] = 0;
  count(table, why == SlotState::kOptions  ? kStatRebuildOptions
               : why == SlotState::kLength ? kStatRebuildLength
                                           : kStatRebuildTokens);
}

// The slot stays marked: its row is scanned until there is room again.
__device__ inline void give_up_slot(const Table& table, uint32_t slot_id) {
  uint32_t* slot = table.slot(slot_id);
  slot[kSlotGivenUp] = larger(slot[kSlotHeld], 1u);
  slot[kSlotIndexed] = 0;
  drop_entries(table, slot_id);
  count(table, kStatGivenUp);
}

// Notes that the ends below `indexed` are: by the first lanes of a warp.
__device__ inline void note_indexed(const Table& table, uint32_t slot_id, const int32_t* tokens, uint32_t indexed) {
  uint32_t* slot = table.slot(slot_id);
  const uint32_t lane = lane_id();
  if (lane == 0) slot[kSlotIndexed] = indexed;
  if (lane < kTailTokens && kTailTokens - lane <= indexed) {
    slot[kSlotTail + lane] = static_cast<uint32_t>(tokens[indexed - (kTailTokens - lane)]);
  }
}

}  // namespace ngram_npu::cuda
