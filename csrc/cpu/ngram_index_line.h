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

}  // namespace
}  // namespace ngram_npu::cpu
