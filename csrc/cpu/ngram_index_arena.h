// Pages and slots of the index tensor, and the operations on an index that are compiled per instruction set.
#pragma once

#include <cstddef>

#include "core/draft_costs.h"
#include "core/lookup_rules.h"
#include "core/ngram_index_layout.h"

namespace ngram_npu::cpu {

// The parts of the tensor. For memory safety, the code relies only on these pointers and numbers, which open_arena()
// has checked against the tensor's size, and not on the tensor's other contents.
struct Arena {
  uint32_t* header;
  uint32_t* slots;
  uint32_t* page_owners;  // for each page: the slot that owns it, or the next free page
  uint32_t* pages;
  uint32_t num_slots;
  uint32_t num_pages;

  NGRAM_FN uint32_t* slot(uint32_t id) const { return slots + id * index::kSlotWords; }
  // Returns a valid address for any id.
  NGRAM_FN uint32_t* page(uint32_t id) const {
    return pages + (id < num_pages ? id : num_pages - 1) * static_cast<size_t>(index::kPageWords);
  }
};

// Finds the parts of the tensor. Returns false if the header does not match the tensor's size.
bool open_arena(int32_t* index, int64_t words, Arena* arena);

// Allocates a page for a slot without clearing the page. Returns kNoPage if no page is left. Thread-safe.
constexpr uint32_t kNoPage = ~0u;
uint32_t allocate_page(const Arena& arena, uint32_t slot_id);
// Frees a page of a slot. Thread-safe.
void release_page(const Arena& arena, uint32_t slot_id, uint32_t page);

// Frees all pages of a slot and empties the slot.
void clear_slot(const Arena& arena, uint32_t slot_id);
// Frees all pages of a slot and marks the slot as disabled: its row is scanned until there is enough memory again.
void disable_slot(const Arena& arena, uint32_t slot_id);
// Whether a disabled slot can be enabled again: 1.25 times as many pages as the slot had are free, and the slot was not
// disabled because its table reached the maximum size.
bool can_enable_again(const Arena& arena, uint32_t slot_id);

// Increases a statistic.
void add_to_statistic(const Arena& arena, index::Header statistic, uint32_t amount = 1);

// Returns the address of the word with the id of outcome page `number`, in a slot with num_pages outcome pages.
inline uint32_t* outcome_page_id(const Arena& arena, uint32_t* slot, uint32_t num_pages, uint32_t number) {
  uint32_t* root = slot + index::kSlotOutcomeRoot;
  if (num_pages <= index::kRootOutcomePages) return root + number;
  return arena.page(root[number >> index::kPageEntriesLog2]) + (number & ((1u << index::kPageEntriesLog2) - 1));
}

struct IndexOptions {
  int64_t min_n;
  int64_t max_n;
  int32_t match_policy;
  bool ladder;
  bool outcomes;
};

// Prepares a slot to continue with this row. The slot is cleared if it was indexed with other options, has indexed more
// than `max_indexed` tokens, or if the last tokens that it indexed differ from the row's tokens at these positions.
// Returns whether the slot is usable.
bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t max_indexed);

// Records that the slot has indexed the first `length` tokens.
void set_indexed_length(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length);

// A row to look up. The tokens [first, length) are indexed, and the n-grams that end at the last token are looked up.
struct IndexQuery {
  const int32_t* tokens;
  uint32_t readable_words;  // number of words that may be read in the row's memory
  uint32_t slot_id;
  uint32_t first;
  uint32_t length;
  Match match;      // out: the best match
  bool has_memory;  // out; false: no memory was left, so the slot is unusable
};

constexpr int kQueryGroup = 32;      // maximum number of rows that are looked up together
constexpr uint32_t kMaxPending = 8;  // maximum number of new tokens that look_up() indexes per row

// Operations on tables. Each isa_<name>.cpp compiles these operations (ngram_index_walk.h) for its instruction set.
struct IndexOperations {
  // Looks up at most kQueryGroup queries, each with at most kMaxPending new tokens, which it first indexes.
  void (*look_up)(const Arena& arena, const IndexOptions& options, IndexQuery* queries, int count, int64_t k);
  // Indexes the tokens [first, length) of a row. Returns false if no memory is left.
  bool (*extend)(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens,
                 uint32_t readable_words, uint32_t first, uint32_t length);
};

extern const IndexOperations kIndexOperationsScalar;
#if defined(__x86_64__)
extern const IndexOperations kIndexOperationsAvx2;
extern const IndexOperations kIndexOperationsAvx512;
#elif defined(__aarch64__)
extern const IndexOperations kIndexOperationsNeon;
#endif

// Returns the operations for the instruction set in use (machine.h).
const IndexOperations& index_operations();

namespace {

using namespace index;

// The outcomes of a ladder's slot (one byte per token, in pages of the arena) and the candidate for the next token.
class Outcomes {
 public:
  Outcomes(const Arena& arena, uint32_t slot_id) : arena_(arena), slot_(arena.slot(slot_id)), slot_id_(slot_id) {}

  // The outcome byte of the token at `position`; 0 if none is recorded.
  uint8_t operator()(int64_t position) {
    const uint32_t number = static_cast<uint32_t>(position >> kOutcomePageBits);
    return number == cached_page_ || number < num_pages() ? *byte_at(number, position) : 0;
  }

  // Writes an outcome byte. Positions must be in order. Returns false if no memory is left or the slot is corrupt.
  bool write(uint32_t position, uint8_t outcome) {
    const uint32_t number = position >> kOutcomePageBits;
    if (number != cached_page_ && (number > num_pages() || (number == num_pages() && !add_page()))) return false;
    *byte_at(number, position) = outcome;
    return true;
  }

  void prefetch(uint32_t position) {
    const uint32_t number = position >> kOutcomePageBits;
    if (number < num_pages()) __builtin_prefetch(byte_at(number, position));
  }

  // The candidate for the next token of a row with `length` indexed tokens. The match is inside the row even if the
  // slot is corrupt.
  Match candidate(uint32_t length) const {
    const uint32_t word = slot_[kSlotCandidate];
    const int64_t len = smaller<int64_t>(word & 31u, kLadderMaxN), position = word >> 5;
    return len > 0 && len <= position && position < length ? Match{position - 1, len} : Match{-1, 0};
  }
  void set_candidate(Match match) { slot_[kSlotCandidate] = static_cast<uint32_t>((match.end + 1) << 5 | match.len); }

 private:
  uint32_t num_pages() const { return smaller(slot_[kSlotOutcomePages], kMaxOutcomePages); }

  // The outcome byte of a token, in an existing page. The page is cached, because most positions are consecutive.
  uint8_t* byte_at(uint32_t number, int64_t position) {
    if (number != cached_page_) {
      bytes_ = reinterpret_cast<uint8_t*>(arena_.page(*outcome_page_id(arena_, slot_, num_pages(), number)));
      cached_page_ = number;
    }
    return bytes_ + (position & ((1 << kOutcomePageBits) - 1));
  }

  bool add_page() {
    const uint32_t count = num_pages();
    const uint32_t new_count = count + 1;
    if (new_count > kMaxOutcomePages) return false;
    const uint32_t page = allocate_page(arena_, slot_id_);
    if (page == kNoPage) return false;
    if (count_outcome_directories(new_count) > count_outcome_directories(count)) {
      const uint32_t directory = allocate_page(arena_, slot_id_);
      if (directory == kNoPage) {
        release_page(arena_, slot_id_, page);
        return false;
      }
      // The page ids that were in the slot move to the first directory page.
      uint32_t* root = slot_ + kSlotOutcomeRoot;
      uint32_t* words = arena_.page(directory);
      if (count == kRootOutcomePages) {
        for (uint32_t i = 0; i < count; ++i) words[i] = root[i];
      }
      root[count >> kPageEntriesLog2] = directory;
      ++slot_[kSlotPages];
    }
    slot_[kSlotOutcomePages] = new_count;
    ++slot_[kSlotPages];
    *outcome_page_id(arena_, slot_, new_count, count) = page;
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
