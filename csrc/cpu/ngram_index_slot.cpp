// The state of a slot's row, and whether the row is still the one that was indexed.
#include <cstring>

#include "cpu/ngram_index.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {

using namespace index;

namespace {

bool tail_agrees(const uint32_t* slot, const int32_t* tokens, uint32_t length) {
  const uint32_t* tail = slot + kSlotTail;
  if (length >= kTailTokens) {
    uint64_t ours[kTailTokens / 2], theirs[kTailTokens / 2];
    std::memcpy(ours, tail, sizeof ours);
    std::memcpy(theirs, tokens + length - kTailTokens, sizeof theirs);
    return ((ours[0] ^ theirs[0]) | (ours[1] ^ theirs[1]) | (ours[2] ^ theirs[2]) | (ours[3] ^ theirs[3])) == 0;
  }
  return std::memcmp(tail + kTailTokens - length, tokens, length * sizeof *tail) == 0;
}

}  // namespace

bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t known) {
  uint32_t* slot = arena.slot(slot_id);
  const uint32_t packed =
      pack_options(options.min_n, options.max_n, options.match_policy, options.ladder, options.outcomes);
  const uint32_t length = slot[kSlotLength];
  if (slot[kSlotOptions] != packed) {
    if (slot[kSlotOptions] != 0) count(arena, kStatRebuildOptions);
    clear_slot(arena, slot_id);
  } else if (length > known) {
    count(arena, kStatRebuildLength);
    clear_slot(arena, slot_id);
  } else if (!tail_agrees(slot, tokens, length)) {
    count(arena, kStatRebuildTokens);
    clear_slot(arena, slot_id);
  } else if (slot[kSlotGivenUp] != 0) {
    if (!has_room_again(arena, slot_id)) return false;
    clear_slot(arena, slot_id);
  }
  slot[kSlotOptions] = packed;
  return true;
}

void note_indexed(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length) {
  uint32_t* slot = arena.slot(slot_id);
  slot[kSlotLength] = length;
  if (length >= kTailTokens) {
    std::memcpy(slot + kSlotTail, tokens + length - kTailTokens, kTailTokens * sizeof *slot);
  } else {
    for (uint32_t i = 0; i < length; ++i) slot[kSlotTail + kTailTokens - length + i] = static_cast<uint32_t>(tokens[i]);
  }
}

}  // namespace ngram_npu::cpu

using namespace ngram_npu;

NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_index_lengths(const int32_t* index, int64_t words, const int32_t* slots,
                                                        int64_t count, int64_t* lengths) {
  cpu::Arena arena;
  const bool usable = cpu::open_arena(const_cast<int32_t*>(index), words, &arena);
  for (int64_t i = 0; i < count; ++i) {
    const bool known = usable && slots[i] >= 0 && static_cast<uint32_t>(slots[i]) < arena.num_slots;
    lengths[i] = known ? arena.slot(static_cast<uint32_t>(slots[i]))[index::kSlotLength] : 0;
  }
}
