// CPU kernels of the device store's operators: the definition that a device's kernels are compared with, and the store
// of runners without a device.
#include "core/device_store.h"

using namespace ngram_npu;
using namespace ngram_npu::device_store;

namespace {

void append_request(const DeviceStoreAppendParams& p, const DeviceStoreAppend& append, int64_t i) {
  const int64_t row = p.row_indices[i], scope = scope_of(p.scopes, i);
  const uint64_t seed = seed_of_scope(scope);
  for (int64_t j = 0; j < append.num_blocks; ++j) write_head(p, append, scope, j);
  for (int64_t t = 0; t < append.count; ++t) {
    write_token(p, append, row, t);
    for (int64_t level = 0; level < kSizes; ++level) {
      int32_t* const entry = find_entry(p, append, row, seed, t, level);
      if (entry != nullptr) *entry = larger(*entry, position_of(append, t));
    }
  }
  finish_append(p, append, i);
}

// Replaces the draft of request i if the store has a longer match.
void propose(const DeviceStoreProposeParams& p, int64_t i) {
  const Query query = query_of(p, i);
  if (query.length == 0) return;
  const uint64_t seed = seed_of_scope(query.scope);
  for (int64_t level = kSizes - 1; level >= 0; --level) {
    const int32_t n = size_of_level(level);
    if (n <= p.match_len[i]) return;
    if (n > query.length) continue;
    const int64_t column = table_column(hash_tokens(query.end, n), seed, level, p.contents.table.capacity);
    const Occurrence found = find_occurrence(p.contents, p.contents.table[level][column], n, query.scope);
    if (found.row < 0) continue;
    int64_t num_equal = 0;
    while (num_equal < n && gram_token(p.contents, found, num_equal) == query.end[-1 - num_equal]) ++num_equal;
    if (num_equal < n) continue;
    const Continuation draft = find_continuation(p.contents, found, query);
    for (int64_t j = 0; j < p.k; ++j) write_draft_token(p, query, draft, n, i, j);
    return;
  }
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_device_store_append_(const DeviceStoreAppendParams* params, void*) {
  const DeviceStoreAppendParams& p = *params;
  const int64_t limit = max_new_blocks(p);
  int64_t num_reserved = 0;
  for (int64_t i = 0, reserved = 0; i < p.batch; ++i) {
    reserved += blocks_for_tokens(begin_append(p, i).count);
    if (reserved <= limit) num_reserved = reserved;
  }
  int64_t next = next_number(p);
  for (int64_t i = 0, reserved = 0; i < p.batch; ++i) {
    DeviceStoreAppend append = begin_append(p, i);
    reserved += blocks_for_tokens(append.count);
    if (append.is_active == 0) continue;
    plan_blocks(p, reserved, num_reserved, &append);
    append.first_block = static_cast<int32_t>(next);
    next += append.num_blocks;
    append_request(p, append, i);
  }
  p.allocator[kNextNumber] = p.allocator[kPlannedNumber] = static_cast<int32_t>(next);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_device_store_propose_(const DeviceStoreProposeParams* params, void*) {
  for (int64_t i = 0; i < params->batch; ++i) propose(*params, i);
  return kOk;
}
