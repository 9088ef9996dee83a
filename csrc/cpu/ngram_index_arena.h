// Pages and slots of the index tensor, and the interface between the operators and the vectorised table.
#pragma once

#include <cstddef>

#include "core/draft_costs.h"
#include "core/lookup_rules.h"
#include "core/ngram_index_layout.h"

namespace ngram_npu::cpu {

// The tensor's parts. The code relies only on the tensor's size and on what open_arena derived from it, never on the
// contents.
struct Arena {
  uint32_t* header;
  uint32_t* slots;
  uint32_t* owners;
  uint32_t* pages;
  uint32_t num_slots;
  uint32_t num_pages;

  NGRAM_FN uint32_t* slot(uint32_t id) const { return slots + id * index::kSlotWords; }
  // Returns a valid address for any id.
  NGRAM_FN uint32_t* page(uint32_t id) const {
    return pages + (id < num_pages ? id : num_pages - 1) * static_cast<size_t>(index::kPageWords);
  }
};

// False if the header does not match the tensor.
bool open_arena(int32_t* index, int64_t words, Arena* arena);

// Allocates a page for a slot, not cleared; returns kNoPage if none is left. Thread-safe, also for several arenas.
constexpr uint32_t kNoPage = ~0u;
uint32_t allocate_page(const Arena& arena, uint32_t slot_id);
void release_page(const Arena& arena, uint32_t slot_id, uint32_t page);

// Frees all pages of a slot and empties it.
void clear_slot(const Arena& arena, uint32_t slot_id);
// The same, but marks the slot as disabled: its row is scanned until there is enough memory again.
void disable_slot(const Arena& arena, uint32_t slot_id);
// Whether a disabled slot can be enabled again: 1.25 times the pages that it had are free, and its table did not reach
// the maximum size.
bool can_enable_again(const Arena& arena, uint32_t slot_id);

void count(const Arena& arena, index::Header statistic, uint32_t times = 1);

// The id of page `number` of a slot that has `pages` pages of outcomes.
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

// Prepares the slot to continue with this row: options, length and last tokens must agree, otherwise it is emptied.
// `max_indexed` is the number of tokens in the row before this call. Returns whether the slot is usable.
bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t max_indexed);

// Records that the slot has indexed the first `length` tokens.
void set_indexed_length(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length);

// One row to look up: the ends from `first` on are not indexed yet; the last one, length - 1, is looked up.
struct IndexQuery {
  const int32_t* tokens;
  uint32_t readable;  // words of the row's memory
  uint32_t slot_id;
  uint32_t first;
  uint32_t length;
  Match match;
  bool ok;  // false: no memory left, the slot is unusable
};

// Maximum number of rows with overlapping cache misses, and of new tokens per row; more tokens are indexed beforehand.
constexpr int kQueryGroup = 32;
constexpr uint32_t kMaxPending = 8;

// The table, compiled once per instruction set (isa_<name>.cpp around ngram_index_table.h).
struct IndexTable {
  // At most kQueryGroup queries of at most kMaxPending tokens each.
  void (*look_up)(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k);
  // Indexes the ends first .. length - 1 of a row; false: no memory left.
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

// The functions for the instruction set in use (machine.h).
const IndexTable& index_table();

namespace {

using namespace index;

// The outcomes of a ladder's slot: one byte per token, in pages of the arena, and the candidate for the next token.
class Outcomes {
 public:
  Outcomes(const Arena& arena, uint32_t slot_id) : arena_(arena), slot_(arena.slot(slot_id)), slot_id_(slot_id) {}

  // The outcome byte of the token at `position`; 0 if none is recorded.
  uint8_t operator()(int64_t position) {
    const uint32_t number = static_cast<uint32_t>(position >> kOutcomePageBits);
    return number == cached_page_ || number < pages() ? *at(number, position) : 0;
  }

  // Writes an outcome byte. Positions must be in order; false: no memory left, or a corrupt slot.
  bool put(uint32_t position, uint8_t outcome) {
    const uint32_t number = position >> kOutcomePageBits;
    if (number != cached_page_ && (number > pages() || (number == pages() && !add_page()))) return false;
    *at(number, position) = outcome;
    return true;
  }

  void prefetch(uint32_t position) {
    const uint32_t number = position >> kOutcomePageBits;
    if (number < pages()) __builtin_prefetch(at(number, position));
  }

  // The candidate for the next token of a row with `length` indexed tokens; it is inside the row even if the slot is
  // corrupt.
  Match candidate(uint32_t length) const {
    const uint32_t word = slot_[kSlotCandidate];
    const int64_t len = smaller<int64_t>(word & 31u, kLadderMaxN), position = word >> 5;
    return len > 0 && len <= position && position < length ? Match{position - 1, len} : Match{-1, 0};
  }
  void set_candidate(Match match) { slot_[kSlotCandidate] = static_cast<uint32_t>((match.end + 1) << 5 | match.len); }

 private:
  uint32_t pages() const { return smaller(slot_[kSlotOutcomePages], kMaxOutcomePages); }

  // The byte in an existing page. The last page is cached, because most positions are consecutive.
  uint8_t* at(uint32_t number, int64_t position) {
    if (number != cached_page_) {
      bytes_ = reinterpret_cast<uint8_t*>(arena_.page(*outcome_page(arena_, slot_, pages(), number)));
      cached_page_ = number;
    }
    return bytes_ + (position & ((1 << kOutcomePageBits) - 1));
  }

  bool add_page() {
    const uint32_t count = pages();
    const uint32_t new_count = count + 1;
    if (new_count > kMaxOutcomePages) return false;
    const uint32_t page = allocate_page(arena_, slot_id_);
    if (page == kNoPage) return false;
    if (outcome_directories(new_count) > outcome_directories(count)) {
      const uint32_t directory = allocate_page(arena_, slot_id_);
      if (directory == kNoPage) {
        release_page(arena_, slot_id_, page);
        return false;
      }
      // The first directory takes over the page ids that the slot contained.
      uint32_t* root = slot_ + kSlotOutcomeRoot;
      uint32_t* words = arena_.page(directory);
      if (count == kRootOutcomePages) {
        for (uint32_t i = 0; i < count; ++i) words[i] = root[i];
      }
      root[count >> kDirPageDepth] = directory;
      ++slot_[kSlotPages];
    }
    slot_[kSlotOutcomePages] = new_count;
    ++slot_[kSlotPages];
    *outcome_page(arena_, slot_, new_count, count) = page;
    return true;
  }

  const Arena& arena_;
  uint32_t* const slot_;
  const uint32_t slot_id_;
  uint32_t cached_page_ = ~0u;
  uint8_t* bytes_ = nullptr;
};

}  // namespace
}  // namespace ngram_npu::cpu
