// Pages and slots of the index tensor, and the seam between the operators and the vectorised table.
#pragma once

#include <cstddef>

#include "core/lookup_rules.h"
#include "core/ngram_index_layout.h"

namespace ngram_npu::cpu {

// The tensor's parts. Trusted are its size and what open_arena derived from it, never its contents.
struct Arena {
  uint32_t* header;
  uint32_t* slots;
  uint32_t* owners;
  uint32_t* pages;
  uint32_t num_slots;
  uint32_t num_pages;

  NGRAM_FN uint32_t* slot(uint32_t id) const { return slots + id * index::kSlotWords; }
  // Any id gives a page.
  NGRAM_FN uint32_t* page(uint32_t id) const {
    return pages + (id < num_pages ? id : num_pages - 1) * static_cast<size_t>(index::kPageWords);
  }
};

// False where the header does not fit the tensor.
bool open_arena(int32_t* index, int64_t words, Arena* arena);

// A page for a slot, not cleared; kNoPage where none is left. Safe among threads, also of different arenas.
constexpr uint32_t kNoPage = ~0u;
uint32_t allocate_page(const Arena& arena, uint32_t slot_id);
void release_page(const Arena& arena, uint32_t slot_id, uint32_t page);

// Gives all pages of a slot back and empties it.
void clear_slot(const Arena& arena, uint32_t slot_id);
// The same, but the slot stays marked: its row is scanned until there is room again.
void give_up_slot(const Arena& arena, uint32_t slot_id);
// Whether a slot given up may try again: a quarter more pages are free than it held, unless its table was at its limit.
bool has_room_again(const Arena& arena, uint32_t slot_id);

void count(const Arena& arena, index::Header statistic, uint32_t times = 1);

// Where a slot with that many pages of outcomes has the id of one of them.
inline uint32_t* outcome_page(const Arena& arena, uint32_t* slot, uint32_t pages, uint32_t number) {
  uint32_t* root = slot + index::kSlotOutcomeRoot;
  if (pages <= index::kRootOutcomePages) return root + number;
  return arena.page(root[number >> index::kDirPageDepth]) + (number & ((1u << index::kDirPageDepth) - 1));
}

struct IndexOptions {
  int64_t min_n;
  int64_t max_n;
  int32_t match_policy;
  bool ladder;
  bool outcomes;
};

// One row to look up: the ends from `first` on are not indexed yet; the last of them, length - 1, is the question.
struct IndexQuery {
  const int32_t* tokens;
  uint32_t readable;  // words of the row's memory
  uint32_t slot_id;
  uint32_t first;
  uint32_t length;
  Occurrence found;
  bool ok;  // false: no room, the slot is unusable
};

// Rows whose cache misses overlap, and the new tokens of one of them that take part; more are indexed beforehand.
constexpr int kQueryGroup = 32;
constexpr uint32_t kMaxPending = 8;

// The table, compiled once per instruction set (ngram_index_<isa>.cpp around ngram_index_table.h).
struct IndexTable {
  // At most kQueryGroup queries of at most kMaxPending tokens each.
  void (*look_up)(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k);
  // Indexes the ends first .. length - 1 of a row; false: no room.
  bool (*extend)(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                 uint32_t readable, uint32_t first, uint32_t length);
};

extern const IndexTable kIndexTableScalar;
#if defined(__x86_64__)
extern const IndexTable kIndexTableAvx2;
extern const IndexTable kIndexTableAvx512;
#elif defined(__aarch64__)
extern const IndexTable kIndexTableNeon;
#endif

// The one for the instruction set in force (instruction_set.h).
const IndexTable& index_table();

}  // namespace ngram_npu::cpu
