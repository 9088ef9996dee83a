// One line of entries, and vectors of several ends: what ngram_index_table.h asks of an instruction set. Internal
// linkage, for the reason given there.
#pragma once

#include "core/ngram_ladder.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {
namespace {

using namespace index;

// Isa: match(line, want, mask), bit i: lane i agrees in the bits of mask; used(line): entries in the line, which fill
// from lane 0; common_suffix8(a, b) and common_suffix16: of so many tokens each; and what LaneByLane has, where there
// is nothing better.

// An entry as it stands in the page of depth + 1 that a split gives it.
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
  // 16 words at 16 places, both vectors of VectorOf<16>; asked for where kGathers. Several loads and a store are
  // quicker where gathers are not native.
  static constexpr bool kGathers = false;
  static void gather(const uint32_t*, const void*, void*) {}

  // Distributes the entries of a line that are in their home line over the two halves' lines, which it writes whole.
  // Returns the lanes of the others.
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

// Vectors of the compiler's own kind: it makes of them what the instruction set has.
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

// Consecutive ends and where all their grams belong. Made ahead of use, in vectors: of all that a walk does this is
// what does not depend on what it finds. Level by level, shortest gram first.
template <int kRows, uint32_t kWidth>
struct EndsOf {
  using Vector = typename VectorOf<kWidth>::Type;
  uint32_t first;
  uint32_t size;
  uint32_t version;  // of the table when located; a split makes that stale
  Vector key[kRows];
  Vector line[kRows];  // number of the home line, counted over all pages
  Vector want[kRows];  // head of the entry there
  Vector mask[kRows];  // what is compared with it
  Vector next[kRows];  // mask of `next` in that page
  Vector room;         // the least of these
};

}  // namespace
}  // namespace ngram_npu::cpu
