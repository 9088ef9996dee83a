#include "cpu/ngram_store_intake.h"

#include <cstring>

namespace ngram_npu::cpu {

using namespace store;

namespace {

// The rows of one call. Their text is complete in the store when this is destroyed.
class StoreIntake {
 public:
  explicit StoreIntake(const Store& store) : store_(store), entering_(store) {}
  ~StoreIntake() { entering_.flush(); }
  StoreIntake(const StoreIntake&) = delete;
  StoreIntake& operator=(const StoreIntake&) = delete;

  // Enters the last `num_sampled` tokens of slot `id`'s row, and what is missing before them.
  void take_in(int64_t id, const StoredRow& row, int64_t num_sampled);

 private:
  bool continues(const uint32_t* slot, const StoredRow& row) const;
  int64_t write(uint32_t* slot, const StoredRow& row, int64_t at, int64_t upto, uint64_t seed);
  void give_out(uint32_t* slot, uint64_t scope);

  const Store& store_;
  Entering entering_;
  int64_t backlog_ = store::kBacklogTokens;
};

void StoreIntake::take_in(int64_t id, const StoredRow& row, int64_t num_sampled) {
  if (id < 0 || id >= store_.num_slots) return;
  const uint32_t slot_id = static_cast<uint32_t>(id);
  uint32_t* const slot = store_.slot(slot_id);
  const int64_t sampled = smaller(num_sampled, row.length);
  if (!continues(slot, row)) {
    close_slot(store_, slot_id, &entering_);
    slot[kSlotLength] = static_cast<uint32_t>(row.length - sampled);
  }
  const int64_t from = slot[kSlotLength];
  const int64_t late = smaller(larger<int64_t>(row.length - sampled - from, 0), backlog_);
  backlog_ -= late;
  const int64_t upto = smaller(row.length, from + late + sampled);
  const uint64_t seed = scope_seed(row.scope);
  for (int64_t at = from; at < upto;) at += write(slot, row, at, upto, seed);
}

// Whether the row continues the slot's request.
bool StoreIntake::continues(const uint32_t* slot, const StoredRow& row) const {
  const uint32_t serial = slot[kSlotSerial], stored = slot[kSlotLength];
  if (!store_.alive(serial) || store_.scope(serial) != row.scope || stored > row.length) return false;
  const uint32_t fill = store_.fill(serial), n = smaller(fill, kOverlap);
  return n <= stored && std::memcmp(store_.text(serial) + fill - n, row.tokens + stored - n, n * sizeof(int32_t)) == 0;
}

// Writes those of the tokens from `at` to `upto` that fit into the slot's block; returns their number.
int64_t StoreIntake::write(uint32_t* slot, const StoredRow& row, int64_t at, int64_t upto, uint64_t seed) {
  if (slot[kSlotSerial] == 0 || store_.fill(slot[kSlotSerial]) == kBlockTokens) {
    entering_.flush();
    give_out(slot, row.scope);
  }
  const uint32_t serial = slot[kSlotSerial], fill = store_.fill(serial);
  const uint32_t count = static_cast<uint32_t>(smaller<int64_t>(upto - at, kBlockTokens - fill));
  std::memcpy(store_.text(serial) + fill, row.tokens + at, count * sizeof(int32_t));
  store_.head(serial)[kHeadFill] = fill + count;
  slot[kSlotLength] = static_cast<uint32_t>(at + count);
  if (store_.header[kHeaderVisibility] == kFinish) return count;
  for (uint32_t j = 0; j < count; ++j) entering_.add(serial << kBlockBits | (fill + j), row.scope, seed);
  return count;
}

// Allocates the next block for the request of a slot.
void StoreIntake::give_out(uint32_t* slot, uint64_t scope) {
  uint32_t* const header = store_.header;
  if (header[kHeaderNextSerial] == kEndOfSerials) renumber(store_);
  if (header[kHeaderNextSerial] == 0 || header[kHeaderNextSerial] > kEndOfSerials) forget_all(store_);
  uint32_t before = slot[kSlotSerial];
  const uint32_t serial = header[kHeaderNextSerial]++;
  int32_t repeated[kOverlap];
  uint32_t count = 0;
  if (store_.alive(before)) {
    const uint32_t fill = store_.fill(before);
    count = smaller(fill, kOverlap);
    std::memcpy(repeated, store_.text(before) + fill - count, count * sizeof(int32_t));
  } else {
    before = 0;
  }
  uint32_t* const head = store_.head(serial);
  head[kHeadSerial] = serial;
  head[kHeadFill] = head[kHeadFirst] = count;
  head[kHeadPrevious] = before;
  head[kHeadNext] = 0;
  head[kHeadScope] = static_cast<uint32_t>(scope);
  head[kHeadScope + 1] = static_cast<uint32_t>(scope >> 32);
  // The old text may be of another scope: it must not stay in memory or get into a file.
  std::memset(store_.text(serial), 0, kBlockTokens * sizeof(int32_t));
  std::memcpy(store_.text(serial), repeated, count * sizeof(int32_t));
  std::memset(store_.outcomes(serial), 0, kBlockTokens);
  slot[kSlotSerial] = serial;
}

}  // namespace

void take_in(const StoreIntakeParams& p) {
  Store store;
  if (!open_store(p.store.words, p.store.num_words, &store)) return;
  StoreIntake intake(store);
  for (int64_t i = 0; i < p.batch; ++i) {
    const int64_t row = p.row_indices[i];
    const StoredRow stored = stored_row(p.token_ids, row, p.num_tokens, p.num_sampled[i], scope_of(p.scopes, i));
    if (stored.tokens == nullptr) continue;
    intake.take_in(p.slot_indices.bytes != 0 ? p.slot_indices[i] : row, stored, p.num_sampled[i]);
  }
}

}  // namespace ngram_npu::cpu
