// A page of a table: insertion and splitting. Internal linkage, for the reason given in ngram_index_table.h.
#pragma once

#include "cpu/ngram_index_line.h"

namespace ngram_npu::cpu {
namespace {

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
