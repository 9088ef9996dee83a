// Packs token rows of a step for AsyncSpecState (python/ngram_npu/async_state). In Python, packing the row of a new
// request took longer than all operators of its step.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/common.h"

namespace ngram_npu::cpu {

constexpr int64_t kChunkItems = 64;
constexpr int32_t kUnusedItem = -1;

struct SourceRow {
  const char* data;     // int32 items, possibly unaligned: a runner's row may be a slice
  int64_t stride;       // in bytes
  int64_t size;         // number of items
  int64_t min_items;    // the row is padded to at least this many items
  int64_t first_chunk;  // index of the row's first destination chunk

  int64_t num_chunks() const { return (larger(size, min_items) + kChunkItems - 1) / kChunkItems; }
};

// Writes rows as whole chunks, padded with kUnusedItem, and the destination index of each chunk. Returns the smallest
// item of the rows from `split` on; INT32_MAX if they have no items.
inline int32_t pack_rows(const std::vector<SourceRow>& rows, int64_t split, int64_t* chunk_indices, int32_t* chunks) {
  int32_t min_item = INT32_MAX;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SourceRow& row = rows[i];
    for (int64_t j = 0; j < row.size; ++j) std::memcpy(chunks + j, row.data + j * row.stride, sizeof(int32_t));
    if (static_cast<int64_t>(i) >= split && row.size > 0)
      min_item = smaller(min_item, *std::min_element(chunks, chunks + row.size));
    const int64_t num_chunks = row.num_chunks();
    std::fill(chunks + row.size, chunks + num_chunks * kChunkItems, kUnusedItem);
    for (int64_t j = 0; j < num_chunks; ++j) *chunk_indices++ = row.first_chunk + j;
    chunks += num_chunks * kChunkItems;
  }
  return min_item;
}

// Concatenates items[begins[i] : begins[i] + counts[i]].
inline void join_spans(const int32_t* items, const int64_t* begins, const int32_t* counts, int64_t num_spans,
                       int32_t* joined_items) {
  for (int64_t i = 0; i < num_spans; ++i) {
    std::memcpy(joined_items, items + begins[i], sizeof(int32_t) * static_cast<size_t>(counts[i]));
    joined_items += counts[i];
  }
}

}  // namespace ngram_npu::cpu
