// Checks the integrity of an index, for tests and `NgramIndex.check_integrity()`. The checks are slow and do not write.
#include "core/draft_costs.h"
#include "cpu/ngram_index.h"
#include "cpu/ngram_index_arena.h"

using namespace ngram_npu;
using namespace ngram_npu::index;

namespace {

uint32_t* directory_at(const cpu::Arena& arena, uint32_t* slot, uint32_t i) {
  if (slot[kSlotDepth] <= kRootDepth) return slot + kSlotRoot + i;
  return arena.page(slot[kSlotRoot + (i >> kPageEntriesLog2)]) + i % kPageWords;
}

bool has_lines_without_gaps(const uint32_t* page) {
  for (uint32_t i = 0; i + 1 < kPageWords; ++i) {
    if (i % kLineWords != kLineWords - 1 && page[i] == 0 && page[i + 1] != 0) return false;
  }
  return true;
}

IndexFault check_slot(const cpu::Arena& arena, uint32_t slot_id) {
  uint32_t* slot = arena.slot(slot_id);
  if (slot[kSlotPages] == 0) return kFaultNone;
  const uint32_t depth = slot[kSlotDepth];
  if (depth > kMaxDepth) return kFaultSlot;
  uint32_t num_pages = 0;
  for (uint32_t i = 0; i < 1u << depth;) {
    const uint32_t entry = *directory_at(arena, slot, i);
    if ((entry & 15u) > depth) return kFaultDirectory;
    const uint32_t span = 1u << (depth - (entry & 15u));
    if (i % span != 0) return kFaultDirectory;
    for (uint32_t j = i; j < i + span; ++j) {
      if (*directory_at(arena, slot, j) != entry) return kFaultDirectory;
    }
    if (entry >> 4 >= arena.num_pages || arena.page_owners[entry >> 4] != slot_id + 1) return kFaultOwner;
    if (!has_lines_without_gaps(arena.page(entry >> 4))) return kFaultLine;
    ++num_pages;
    i += span;
  }
  if (depth > kRootDepth) num_pages += depth <= kPageEntriesLog2 ? 1 : 1u << (depth - kPageEntriesLog2);
  const uint32_t num_outcome_pages = slot[kSlotOutcomePages];
  const bool has_outcomes = (slot[kSlotOptions] & kOptionOutcomes) != 0;
  if (num_outcome_pages !=
      (has_outcomes ? (slot[kSlotLength] + (1u << kOutcomePageBits) - 1) >> kOutcomePageBits : 0)) {
    return kFaultPageCount;
  }
  for (uint32_t i = 0; i < num_outcome_pages; ++i) {
    const uint32_t page = *cpu::outcome_page_id(arena, slot, num_outcome_pages, i);
    if (page >= arena.num_pages || arena.page_owners[page] != slot_id + 1) return kFaultOwner;
  }
  num_pages += num_outcome_pages + count_outcome_directories(num_outcome_pages);
  return num_pages == slot[kSlotPages] ? kFaultNone : kFaultPageCount;
}

IndexFault check_pages(const cpu::Arena& arena, int64_t* location) {
  uint32_t num_pages_in_slots = 0;
  for (uint32_t i = 0; i < arena.num_slots; ++i) num_pages_in_slots += arena.slot(i)[kSlotPages];
  uint32_t num_owned_pages = 0, num_freed_pages = 0, num_unused_pages = 0;
  for (uint32_t i = 0; i < arena.num_pages; ++i) {
    const uint32_t owner = arena.page_owners[i];
    *location = i;
    if (owner >> 31 != 0)
      ++num_freed_pages;
    else if (owner == 0)
      ++num_unused_pages;
    else if (owner <= arena.num_slots)
      ++num_owned_pages;
    else
      return kFaultOwner;
  }
  uint32_t num_listed_pages = 0;
  for (uint32_t head = arena.header[kHeaderFreePage]; head != 0; ++num_listed_pages) {
    *location = head - 1;
    if (head > arena.num_pages || arena.page_owners[head - 1] >> 31 == 0 || num_listed_pages > arena.num_pages)
      return kFaultFreeList;
    head = arena.page_owners[head - 1] << 1 >> 1;
  }
  if (num_listed_pages != num_freed_pages) return kFaultFreeList;
  if (num_owned_pages != num_pages_in_slots || num_owned_pages != arena.header[kHeaderPagesInUse]) return kFaultInUse;
  return arena.header[kHeaderUnusedPage] + num_unused_pages == arena.num_pages ? kFaultNone : kFaultInUse;
}

Key key_of(const int32_t* tokens, uint32_t end, uint32_t n, uint32_t level) {
  uint32_t hash = 0;
  for (uint32_t j = 0; j < n; ++j) hash += static_cast<uint32_t>(tokens[end - j]) * kFactors.values[j];
  return make_key(hash, level);
}

// The n-gram length of each level of a slot.
struct NgramLengths {
  uint32_t values[kMaxLevels];
  uint32_t num_levels;  // 0 if no operator writes these options
};
NgramLengths ngram_lengths_of(uint32_t options) {
  NgramLengths lengths{};
  const uint32_t min_n = options & 0xffu, max_n = options >> 8 & 0xffu;
  if ((options & kOptionLadder) != 0) {
    if (min_n != 1 || max_n != kLadderMaxN) return lengths;
    for (lengths.num_levels = 0; lengths.num_levels < kLadderLevels; ++lengths.num_levels) {
      lengths.values[lengths.num_levels] = ladder_ngram_length(lengths.num_levels);
    }
  } else if (min_n >= 1 && max_n <= kMaxNgram && max_n >= min_n && max_n - min_n < kMaxLevels) {
    for (uint32_t n = min_n; n <= max_n; ++n) lengths.values[lengths.num_levels++] = n;
  }
  return lengths;
}

// Checks that each entry of a page records an end in the row, and that the entry is in the page and line of the key of
// the n-gram at this end.
IndexFault check_entries(const cpu::Arena& arena, uint32_t* slot, uint32_t dir_entry, const int32_t* tokens,
                         const NgramLengths& lengths) {
  const uint32_t depth = dir_entry & 15u;
  const uint32_t* page = arena.page(dir_entry >> 4);
  for (uint32_t w = 0; w < kPageWords; ++w) {
    if (page[w] == 0) continue;
    const uint32_t next = page[w] & next_mask(depth);
    const uint32_t level = page[w] >> level_shift(depth) & 7u;
    if (level >= lengths.num_levels) return kFaultPlace;
    if (next < lengths.values[level] || next > slot[kSlotLength]) return kFaultOutside;
    const Key key = key_of(tokens, next - 1, lengths.values[level], level);
    if (*directory_at(arena, slot, dir_index(key, slot[kSlotDepth])) != dir_entry ||
        (page[w] & ~(next_mask(depth) | repeated_bit(depth))) != entry_head(key, depth) ||
        line_of(key) / kGroupLines != w / kLineWords / kGroupLines) {
      return kFaultPlace;
    }
  }
  return kFaultNone;
}

// Whether the n tokens that end at `end` equal the n tokens that end at other_end.
bool have_equal_ngrams(const int32_t* tokens, uint32_t end, uint32_t other_end, uint32_t n) {
  while (n > 0 && tokens[end--] == tokens[other_end--]) --n;
  return n == 0;
}

// Finds the entry of the n-gram t[end-n+1..end] without relying on correct contents. Returns null if there is none.
const uint32_t* find_entry(const cpu::Arena& arena, uint32_t* slot, const int32_t* tokens, uint32_t end, uint32_t n,
                           uint32_t level, uint32_t* depth) {
  const Key key = key_of(tokens, end, n, level);
  const uint32_t dir_entry = *directory_at(arena, slot, dir_index(key, slot[kSlotDepth]));
  *depth = dir_entry & 15u;
  const uint32_t head = entry_head(key, *depth);
  for (uint32_t g = 0; g < kGroupLines; ++g) {
    const uint32_t line_id = (line_of(key) & ~(kGroupLines - 1)) | ((line_of(key) + g) % kGroupLines);
    const uint32_t* line = arena.page(dir_entry >> 4) + line_id * kLineWords;
    for (uint32_t lane = 0; lane < kLineWords; ++lane) {
      const uint32_t next = line[lane] & next_mask(*depth);
      if (next == 0 || (line[lane] & ~(next_mask(*depth) | repeated_bit(*depth))) != head || next < n) continue;
      if (have_equal_ngrams(tokens, next - 1, end, n)) return line + lane;
    }
    if (line[kLineWords - 1] == 0) return nullptr;
  }
  return nullptr;
}

// Returns the candidate for the token after t[0..length), computed as the contract defines it, which is slow.
Match find_candidate(const int32_t* tokens, uint32_t length) {
  for (uint32_t level = kLadderLevels; level-- > 0;) {
    const uint32_t n = ladder_ngram_length(level);
    for (uint32_t position = length; n <= length && --position >= n;) {
      if (!have_equal_ngrams(tokens, position - 1, length - 1, n)) continue;
      uint32_t len = n;
      while (len < kLadderMaxN && len < position && tokens[position - 1 - len] == tokens[length - 1 - len]) ++len;
      return {int64_t{position} - 1, len};
    }
  }
  return {-1, 0};
}

IndexFault check_outcomes(const cpu::Arena& arena, uint32_t slot_id, const int32_t* tokens) {
  cpu::Outcomes outcomes(arena, slot_id);
  const uint32_t* slot = arena.slot(slot_id);
  const uint32_t length = slot[kSlotLength];
  const Match candidate = outcomes.candidate(length), expected_candidate = find_candidate(tokens, length);
  if (candidate.end != expected_candidate.end || candidate.len != expected_candidate.len) return kFaultCandidate;
  for (uint32_t position = 0; position < length && slot[kSlotOutcomePages] > 0; ++position) {
    if (outcomes(position) != outcome_of(find_candidate(tokens, position), tokens, position)) return kFaultOutcome;
  }
  return kFaultNone;
}

}  // namespace

int32_t ngram_npu_cpu_ngram_index_check(const int32_t* index, int64_t words, int64_t* location) {
  cpu::Arena arena;
  int64_t ignored_location = 0;
  if (location == nullptr) location = &ignored_location;
  *location = 0;
  if (!cpu::open_arena(const_cast<int32_t*>(index), words, &arena)) return kFaultHeader;
  for (uint32_t i = 0; i < arena.num_slots; ++i) {
    *location = i;
    if (const IndexFault fault = check_slot(arena, i); fault != kFaultNone) return fault;
  }
  return check_pages(arena, location);
}

int32_t ngram_npu_cpu_ngram_index_check_row(const int32_t* index, int64_t words, int64_t slot_id, const int32_t* tokens,
                                            int64_t num_tokens) {
  cpu::Arena arena;
  if (!cpu::open_arena(const_cast<int32_t*>(index), words, &arena)) return kFaultHeader;
  if (slot_id < 0 || slot_id >= arena.num_slots) return kFaultNoSlot;
  uint32_t* slot = arena.slot(static_cast<uint32_t>(slot_id));
  if (slot[kSlotDisabled] != 0 || slot[kSlotPages] == 0) return kFaultNone;
  if (const IndexFault fault = check_slot(arena, static_cast<uint32_t>(slot_id)); fault != kFaultNone) return fault;
  const uint32_t length = slot[kSlotLength];
  if (length > num_tokens) return kFaultRow;
  const NgramLengths lengths = ngram_lengths_of(slot[kSlotOptions]);
  const bool records_latest = (slot[kSlotOptions] >> 16 & 1u) != 0;
  if (lengths.num_levels == 0) return kFaultSlot;
  uint32_t num_entries = 0;
  for (uint32_t i = 0; i < 1u << slot[kSlotDepth];) {
    const uint32_t dir_entry = *directory_at(arena, slot, i);
    if (const IndexFault fault = check_entries(arena, slot, dir_entry, tokens, lengths); fault != kFaultNone)
      return fault;
    const uint32_t* page = arena.page(dir_entry >> 4);
    for (uint32_t w = 0; w < kPageWords; ++w) num_entries += page[w] != 0;
    i += 1u << (slot[kSlotDepth] - (dir_entry & 15u));
  }
  uint32_t num_expected = 0;  // number of entries that must exist, each counted at the end that it records
  for (uint32_t end = lengths.values[0] - 1; end < length; ++end) {
    for (uint32_t level = 0; level < lengths.num_levels && lengths.values[level] <= end + 1; ++level) {
      const uint32_t n = lengths.values[level];
      // How often and where this n-gram occurs in the row.
      uint32_t num_occurrences = 0, first_end = 0, last_end = 0;
      for (uint32_t e = n - 1; e < length; ++e) {
        if (!have_equal_ngrams(tokens, e, end, n)) continue;
        if (num_occurrences++ == 0) first_end = e;
        last_end = e;
      }
      uint32_t depth = 0;
      const uint32_t* entry = find_entry(arena, slot, tokens, end, n, level, &depth);
      if (entry == nullptr) return kFaultMissing;
      const uint32_t recorded_end = (*entry & next_mask(depth)) - 1;
      if (recorded_end != (records_latest ? last_end : first_end)) return kFaultRecorded;
      const bool is_repeated = (*entry & repeated_bit(depth)) != 0;
      if (level + 1 < lengths.num_levels && is_repeated != (num_occurrences > 1)) return kFaultLazyRule;
      num_expected += recorded_end == end;
      if (num_occurrences == 1) break;  // longer n-grams have no entry
    }
  }
  if (num_entries != num_expected) return kFaultLazyRule;
  const bool is_ladder = (slot[kSlotOptions] & kOptionLadder) != 0;
  return is_ladder ? check_outcomes(arena, static_cast<uint32_t>(slot_id), tokens) : kFaultNone;
}
