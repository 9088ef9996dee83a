// A page of a table: its lines of entries, insertion and splitting; and vectors of several ends. Internal linkage, for
// the reason given in ngram_index_table.h.
#pragma once

#include "core/ngram_ladder.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {
namespace {

using namespace index;

// Isa has: match(line, want, mask), bit i: lane i agrees in the bits of mask; used(line): number of entries in the
// line, which fill from lane 0; common_suffix8(a, b) and common_suffix16 of 8 and 16 tokens; and the functions of
// LaneByLane or faster ones.

// An entry after a split, in its page of depth + 1.
inline uint32_t deepened(uint32_t entry, uint32_t depth) {
  const uint32_t next = next_mask(depth);
  return (entry & ~next) << 1 | (entry & next);
}

// An entry of a gram, and the occurrence that it records.
struct Hit {
  uint32_t* entry;
  uint32_t word;  // the entry when it was found
  uint32_t mask;  // of `next` in it
  uint32_t next;
  uint32_t common;  // tokens up to max_n that agree there
  bool twice() const { return (word & (mask + 1)) != 0; }
  void set_twice() const { *entry |= mask + 1; }
  void record(uint32_t at) const { *entry = word + (at - next); }
};

struct LaneByLane {
  // With kGathers, Isa also has a gather of 16 words at 16 places, both of VectorOf<16>. Without native gathers several
  // loads and a store are faster.
  static constexpr bool kGathers = false;
  static void gather(const uint32_t*, const void*, void*) {}

  // Distributes the entries that are in their home line to the lines of the two halves, which it overwrites. Returns
  // the lanes of the other entries.
  static uint32_t split_line(const uint32_t* line, uint32_t home, uint32_t depth, uint32_t* low, uint32_t* high) {
    uint32_t* const out[2] = {low, high};
    uint32_t used[2] = {0, 0};
    uint32_t displaced = 0;
    for (uint32_t lane = 0; lane < kLineWords; ++lane) low[lane] = high[lane] = 0;
    for (uint32_t lane = 0; lane < kLineWords && line[lane] != 0; ++lane) {
      if ((line[lane] >> home_shift(depth)) % kGroupLines != home) {
        displaced |= 1u << lane;
      } else {
        const uint32_t half = line[lane] >> 31;
        out[half][used[half]++] = deepened(line[lane], depth);
      }
    }
    return displaced;
  }
};

// The compiler's generic vectors, which it maps to the instruction set.
template <uint32_t kWidth>
struct VectorOf;
template <>
struct VectorOf<8> {
  typedef uint32_t Type __attribute__((vector_size(32)));
};
template <>
struct VectorOf<16> {
  typedef uint32_t Type __attribute__((vector_size(64)));
};

// Consecutive ends and the places of all their grams, level by level, shortest gram first. They are computed ahead of
// the walk and in vectors, because they do not depend on what the walk finds.
template <int kRows, uint32_t kWidth>
struct EndsOf {
  using Vector = typename VectorOf<kWidth>::Type;
  uint32_t first;
  uint32_t size;
  uint32_t version;  // of the table when located; a split makes the lines stale
  Vector key[kRows];
  Vector line[kRows];  // number of the home line, counted over all pages
  Vector want[kRows];  // head of the entry there
  Vector mask[kRows];  // mask of the bits to compare
  Vector next[kRows];  // mask of `next` in that page
  Vector room;         // the minimum of `next`
};

inline bool is_full(const uint32_t* line) { return line[kLineWords - 1] != 0; }

// Inserts an entry into the first line of its group with room; false: all are full.
template <class Isa>
bool put_entry(uint32_t* page, uint32_t line_id, uint32_t entry) {
  for (uint32_t i = 0; i < kGroupLines; ++i) {
    uint32_t* line = page + line_id * kLineWords;
    if (!is_full(line)) {
      line[Isa::used(line)] = entry;
      return true;
    }
    line_id = (line_id & ~(kGroupLines - 1)) | ((line_id + 1) & (kGroupLines - 1));
  }
  return false;
}

template <class Isa>
void split_page(uint32_t* low, uint32_t* high, uint32_t depth) {
  if (low == high) return;  // only with a corrupt directory
  alignas(64) uint32_t old[kPageWords];
  __builtin_memcpy(old, low, sizeof old);
  uint32_t displaced[kPageLines];
  uint32_t any_displaced = 0;
  for (uint32_t line = 0; line < kPageLines; ++line) {
    const uint32_t at = line * kLineWords;
    displaced[line] = Isa::split_line(old + at, line % kGroupLines, depth, low + at, high + at);
    any_displaced |= displaced[line];
  }
  if (any_displaced == 0) return;
  // Overflowed entries go last, so that entries in their home line keep their place there.
  for (uint32_t line = 0; line < kPageLines; ++line) {
    for (uint32_t lanes = displaced[line]; lanes != 0; lanes &= lanes - 1) {
      const uint32_t entry = old[line * kLineWords + static_cast<uint32_t>(__builtin_ctz(lanes))];
      const uint32_t home = (line & ~(kGroupLines - 1)) | ((entry >> home_shift(depth)) % kGroupLines);
      put_entry<Isa>(entry >> 31 != 0 ? high : low, home, deepened(entry, depth));
    }
  }
}

}  // namespace
}  // namespace ngram_npu::cpu
