// The state of a ladder's slot besides its table: one byte per token, in pages of the arena, and the candidate for the
// next token.
#pragma once

#include "core/draft_costs.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {
namespace {

using namespace index;

class Outcomes {
 public:
  Outcomes(const Arena& arena, uint32_t slot_id) : arena_(arena), slot_(arena.slot(slot_id)), slot_id_(slot_id) {}

  // The byte of the token at `place`; 0 if none is kept.
  uint8_t operator()(int64_t place) {
    const uint32_t number = static_cast<uint32_t>(place >> kOutcomePageBits);
    return number == at_hand_ || number < pages() ? *at(number, place) : 0;
  }

  // Writes a byte. Places come in order; false: no memory left, or a corrupt slot.
  bool put(uint32_t place, uint8_t outcome) {
    const uint32_t number = place >> kOutcomePageBits;
    if (number != at_hand_ && (number > pages() || (number == pages() && !grow()))) return false;
    *at(number, place) = outcome;
    return true;
  }

  void prefetch(uint32_t place) {
    const uint32_t number = place >> kOutcomePageBits;
    if (number < pages()) __builtin_prefetch(at(number, place));
  }

  // The candidate for the next token of a row whose `length` tokens are indexed; inside the row even if corrupt.
  Occurrence candidate(uint32_t length) const {
    const uint32_t word = slot_[kSlotCandidate];
    const int64_t len = smaller<int64_t>(word & 31u, kLadderMaxN), place = word >> 5;
    return len > 0 && len <= place && place < length ? Occurrence{place - 1, len} : Occurrence{-1, 0};
  }
  void keep_candidate(Occurrence found) {
    slot_[kSlotCandidate] = static_cast<uint32_t>((found.end + 1) << 5 | found.len);
  }

 private:
  uint32_t pages() const { return smaller(slot_[kSlotOutcomePages], kMaxOutcomePages); }

  // The byte in an existing page. The last page is cached, since places come in runs.
  uint8_t* at(uint32_t number, int64_t place) {
    if (number != at_hand_) {
      bytes_ = reinterpret_cast<uint8_t*>(arena_.page(*outcome_page(arena_, slot_, pages(), number)));
      at_hand_ = number;
    }
    return bytes_ + (place & ((1 << kOutcomePageBits) - 1));
  }

  bool grow() {
    const uint32_t count = pages();
    const uint32_t grown = count + 1;
    if (grown > kMaxOutcomePages) return false;
    const uint32_t page = allocate_page(arena_, slot_id_);
    if (page == kNoPage) return false;
    if (outcome_directories(grown) > outcome_directories(count)) {
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
    slot_[kSlotOutcomePages] = grown;
    ++slot_[kSlotPages];
    *outcome_page(arena_, slot_, grown, count) = page;
    return true;
  }

  const Arena& arena_;
  uint32_t* const slot_;
  const uint32_t slot_id_;
  uint32_t at_hand_ = ~0u;
  uint8_t* bytes_ = nullptr;
};

}  // namespace
}  // namespace ngram_npu::cpu
