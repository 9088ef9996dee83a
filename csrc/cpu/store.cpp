// CPU kernels of the store's operators, which the operator implementations (api/store.h) call, and the insertion of new
// text, which drafting on the host also calls.
#include "core/store.h"

#include <cstring>

#include "cpu/ngram_store_drafter.h"

namespace ngram_npu::cpu {

using namespace store;

namespace {

// Inserts the rows of one call. All entries have been inserted when the object is destroyed.
class StoreInserter {
 public:
  explicit StoreInserter(const Store& store) : store_(store), inserter_(store) {}
  ~StoreInserter() { inserter_.flush(); }
  StoreInserter(const StoreInserter&) = delete;
  StoreInserter& operator=(const StoreInserter&) = delete;

  // Inserts the last num_new tokens of the row into the slot, and the missing tokens before these tokens.
  void insert_row(int64_t slot_id, const StoredRow& row, int64_t num_new);

 private:
  bool is_continued_by(const uint32_t* slot, const StoredRow& row) const;
  int64_t write_tokens(uint32_t* slot, const StoredRow& row, int64_t begin, int64_t end, uint64_t seed);
  void allocate_block(uint32_t* slot, uint64_t scope);

  const Store& store_;
  TokenInserter inserter_;
  int64_t backlog_budget_ = store::kBacklogTokens;
};

void StoreInserter::insert_row(int64_t slot_id, const StoredRow& row, int64_t num_new) {
  if (slot_id < 0 || slot_id >= store_.num_slots) return;
  uint32_t* const slot = store_.slot(static_cast<uint32_t>(slot_id));
  num_new = smaller(num_new, row.length);
  if (!is_continued_by(slot, row)) {
    close_slot(store_, static_cast<uint32_t>(slot_id), &inserter_);
    slot[kSlotLength] = static_cast<uint32_t>(row.length - num_new);
  }
  const int64_t begin = slot[kSlotLength];
  const int64_t num_missing = smaller(larger<int64_t>(row.length - num_new - begin, 0), backlog_budget_);
  backlog_budget_ -= num_missing;
  const int64_t end = smaller(row.length, begin + num_missing + num_new);
  const uint64_t seed = scope_seed(row.scope);
  for (int64_t i = begin; i < end;) i += write_tokens(slot, row, i, end, seed);
}

// Whether the row is the current row of the slot's request.
bool StoreInserter::is_continued_by(const uint32_t* slot, const StoredRow& row) const {
  const uint32_t serial = slot[kSlotSerial], stored_length = slot[kSlotLength];
  if (!store_.is_alive(serial) || store_.scope(serial) != row.scope || stored_length > row.length) return false;
  const uint32_t fill = store_.fill(serial), num_compared = smaller(fill, kOverlap);
  return num_compared <= stored_length &&
         std::memcmp(store_.text(serial) + fill - num_compared, row.tokens + stored_length - num_compared,
                     num_compared * sizeof(int32_t)) == 0;
}

// Writes the tokens [begin, end) that fit into the slot's block. Returns the number of written tokens.
int64_t StoreInserter::write_tokens(uint32_t* slot, const StoredRow& row, int64_t begin, int64_t end, uint64_t seed) {
  if (slot[kSlotSerial] == 0 || store_.fill(slot[kSlotSerial]) == kBlockTokens) {
    inserter_.flush();
    allocate_block(slot, row.scope);
  }
  const uint32_t serial = slot[kSlotSerial], fill = store_.fill(serial);
  const uint32_t count = static_cast<uint32_t>(smaller<int64_t>(end - begin, kBlockTokens - fill));
  std::memcpy(store_.text(serial) + fill, row.tokens + begin, count * sizeof(int32_t));
  store_.head(serial)[kHeadFill] = fill + count;
  slot[kSlotLength] = static_cast<uint32_t>(begin + count);
  if (store_.header[kHeaderVisibility] == kFinish) return count;
  for (uint32_t j = 0; j < count; ++j) inserter_.add_token(serial << kBlockBits | (fill + j), row.scope, seed);
  return count;
}

// Allocates the next block for the request of a slot.
void StoreInserter::allocate_block(uint32_t* slot, uint64_t scope) {
  uint32_t* const header = store_.header;
  if (header[kHeaderNextSerial] == kEndOfSerials) renumber_blocks(store_);
  if (header[kHeaderNextSerial] == 0 || header[kHeaderNextSerial] > kEndOfSerials) clear_all_text(store_);
  uint32_t previous_serial = slot[kSlotSerial];
  const uint32_t serial = header[kHeaderNextSerial]++;
  int32_t repeated_tokens[kOverlap];
  uint32_t num_repeated = 0;
  if (store_.is_alive(previous_serial)) {
    const uint32_t fill = store_.fill(previous_serial);
    num_repeated = smaller(fill, kOverlap);
    std::memcpy(repeated_tokens, store_.text(previous_serial) + fill - num_repeated, num_repeated * sizeof(int32_t));
  } else {
    previous_serial = 0;
  }
  uint32_t* const head = store_.head(serial);
  head[kHeadSerial] = serial;
  head[kHeadFill] = head[kHeadFirst] = num_repeated;
  head[kHeadPrevious] = previous_serial;
  head[kHeadNext] = 0;
  head[kHeadScope] = static_cast<uint32_t>(scope);
  head[kHeadScope + 1] = static_cast<uint32_t>(scope >> 32);
  // The old text may belong to another scope, so it must not stay in memory or be copied to a file.
  std::memset(store_.text(serial), 0, kBlockTokens * sizeof(int32_t));
  std::memcpy(store_.text(serial), repeated_tokens, num_repeated * sizeof(int32_t));
  std::memset(store_.outcomes(serial), 0, kBlockTokens);
  slot[kSlotSerial] = serial;
}

}  // namespace

void insert_rows(const StoreInsertParams& p) {
  Store store;
  if (!open_store(p.store.words, p.store.num_words, &store)) return;
  StoreInserter inserter(store);
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t row = p.row_indices[i];
    const StoredRow stored_row =
        make_stored_row(p.token_ids, row, p.num_tokens, p.num_sampled[i], scope_of(p.scopes, i));
    if (stored_row.tokens == nullptr) continue;
    inserter.insert_row(p.slot_indices.bytes != 0 ? p.slot_indices[i] : row, stored_row, p.num_sampled[i]);
  }
}

}  // namespace ngram_npu::cpu

using namespace ngram_npu;

namespace {

constexpr int64_t kQueryRows = 16;  // number of rows that are looked up together, so that their cache misses overlap

// Replaces drafts by better drafts from the store.
void replace_drafts(const NgramStoreStepParams& p, const cpu::StoreDrafter& drafter) {
  const LookupOptions options{0, 0, p.draft_token_ids.capacity, p.max_len, 0, false, p.fill, nullptr, 0};
  for (int64_t first = 0; first < p.batch; first += kQueryRows) {
    const int64_t size = smaller(p.batch - first, kQueryRows);
    cpu::StoreQuery queries[kQueryRows];
    for (int64_t i = 0; i < size; ++i) {
      const int64_t batch_position = first + i;
      queries[i].row = cpu::make_stored_row(p.token_ids, p.row_indices[batch_position], p.num_tokens,
                                            p.num_sampled[batch_position], scope_of(p.scopes, batch_position));
    }
    drafter.look_up(queries, size);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t num_ngram_drafts = larger<int64_t>(0, smaller<int64_t>(p.num_draft_tokens[first + i], options.k));
      cpu::StoreDraft draft;
      if (!drafter.draft(queries[i], options, p.draft_costs[first + i], num_ngram_drafts, &draft)) continue;
      const int32_t padding_token = p.fill ? queries[i].row.tokens[queries[i].row.length - 1] : kNoToken;
      draft.write_outputs(first + i, options, padding_token,
                          {p.draft_token_ids.data, p.draft_token_ids.stride, sizeof(int32_t)},
                          {p.draft_costs.data, p.draft_costs.stride});
      p.num_draft_tokens[first + i] = static_cast<int32_t>(draft.count);
      p.match_len[first + i] = static_cast<int32_t>(draft.match_len);
    }
  }
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const NgramStoreStepParams* params, void*) {
  const NgramStoreStepParams& p = *params;
  cpu::Store store;
  if (!cpu::open_store(p.store.words, p.store.num_words, &store)) return kOk;
  const cpu::StoreLock lock(store);
  if (!lock) {
    cpu::count_skipped_call(store);
    return kOk;
  }
  const StoreLookup lookup{p.store, p.scopes, p.costs, p.cost_limit, p.token_logits};
  replace_drafts(p, cpu::StoreDrafter(lookup));
  cpu::insert_rows(
      {p.store, p.token_ids, p.num_tokens, p.num_sampled, p.row_indices, p.slot_indices, p.scopes, p.batch});
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_finish_(const NgramStoreFinishParams* params, void*) {
  cpu::Store store;
  if (!cpu::open_store(params->store.words, params->store.num_words, &store)) return kOk;
  const cpu::StoreLock lock(store);
  if (!lock) {
    cpu::count_skipped_call(store);
    return kOk;
  }
  cpu::TokenInserter inserter(store);
  for (int64_t i = 0; i < params->count; ++i) {
    const int64_t slot = params->slot_indices[i];
    if (slot >= 0 && slot < store.num_slots) cpu::close_slot(store, static_cast<uint32_t>(slot), &inserter);
  }
  return kOk;
}
