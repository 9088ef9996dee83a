#include "core/ngram_store_step.h"

#include <cstring>

#include "cpu/ngram_store.h"

using namespace ngram_npu;

namespace {

using namespace store;

constexpr Powers kPowers;

class StoreStep {
 public:
  StoreStep(const NgramStoreStepParams& params, const cpu::Store& store)
      : p_(params), store_(store), entering_(store) {}

  void run() {
    for (int64_t first = 0; first < p_.batch; first += kGroup) draft(first, smaller<int64_t>(p_.batch - first, kGroup));
    int64_t backlog = kBacklogTokens;
    for (int64_t i = 0; i < p_.batch; ++i) enter(i, &backlog);
    entering_.flush();
  }

 private:
  static constexpr int64_t kGroup = 16;

  struct Row {
    const int32_t* tokens;  // null: the request is skipped
    int64_t length;
    uint64_t scope;
  };

  Row row_of(int64_t i) const {
    const int64_t row = p_.row_indices[i];
    if (!p_.token_ids.has(row) || p_.num_sampled[i] <= 0) return {};
    const int64_t length = p_.num_tokens[row];
    if (length < 1 || length > p_.token_ids.capacity) return {};
    return {p_.token_ids[row], length, p_.scopes.bytes == 0 ? 0 : static_cast<uint64_t>(p_.scopes[i])};
  }

  void draft(int64_t first, int64_t size) {
    Row rows[kGroup];
    cpu::GramKeys keys[kGroup];
    for (int64_t i = 0; i < size; ++i) {
      rows[i] = row_of(first + i);
      if (rows[i].tokens == nullptr) continue;
      keys[i] = cpu::keys_before(rows[i].tokens + rows[i].length, rows[i].length, scope_seed(rows[i].scope));
      for (uint32_t level = 0; level < keys[i].levels; ++level) __builtin_prefetch(store_.line(keys[i].of[level]));
    }
    for (int64_t i = 0; i < size; ++i) {
      if (rows[i].tokens == nullptr) continue;
      for (uint32_t level = 0; level < keys[i].levels; ++level) cpu::prefetch_hit(store_, keys[i], level);
    }
    for (int64_t i = 0; i < size; ++i) {
      if (rows[i].tokens != nullptr) draft_row(first + i, rows[i], keys[i]);
    }
  }

  void draft_row(int64_t i, const Row& row, const cpu::GramKeys& keys) {
    const int64_t k = p_.draft_token_ids.capacity;
    store_.count(kStatLookups);
    cpu::StoreHit hit{nullptr, 0};
    for (uint32_t level = keys.levels; level-- > 0 && hit.entry == nullptr;)
      hit = cpu::find_hit(store_, keys, level, row.scope, row.tokens + row.length, row.length);
    if (hit.entry == nullptr) return;
    store_.count(kStatHits);
    const uint32_t serial = hit.entry->place >> kBlockBits, offset = hit.entry->place % kBlockTokens;
    const int64_t most = smaller(draft_budget(k, p_.max_len, row.length), int64_t{store_.fill(serial)} - offset);
    uint8_t costs[kMaxDraftTokens];
    int64_t count = 0;
    for (int64_t total = 0; count < most; ++count) {
      const int64_t line = smaller<int64_t>(hit.agreed + count, kCostRows - 1);
      const int64_t column =
          count == 0 ? first_column(hit.entry->state) : store_.outcomes(serial)[offset + count] % kCostColumns;
      costs[count] = p_.costs[line * kStoreCostColumns + column];
      total += costs[count];
      if (total > p_.cost_limit) break;
    }
    const int64_t own = larger<int64_t>(0, smaller<int64_t>(p_.num_draft_tokens[i], k));
    const uint32_t promised = promise_of(kPowers, costs, smaller(count, kPromisedTokens));
    if (promised <= promise_of(kPowers, p_.draft_costs[i], smaller(own, kPromisedTokens))) return;
    int32_t* const draft = p_.draft_token_ids[i];
    uint8_t* const draft_costs = p_.draft_costs[i];
    std::memcpy(draft, store_.text(serial) + offset, static_cast<size_t>(count) * sizeof(int32_t));
    std::memcpy(draft_costs, costs, static_cast<size_t>(count));
    for (int64_t j = count; j < k; ++j) {
      draft[j] = kNoToken;
      draft_costs[j] = kNoCost;
    }
    p_.num_draft_tokens[i] = static_cast<int32_t>(count);
    p_.match_len[i] = static_cast<int32_t>(hit.agreed);
    store_.count(kStatDrafts);
    store_.count(kStatTokens, static_cast<uint32_t>(count));
  }

  void enter(int64_t i, int64_t* backlog) {
    const Row row = row_of(i);
    if (row.tokens == nullptr) return;
    const int64_t id = p_.slot_indices.bytes != 0 ? p_.slot_indices[i] : p_.row_indices[i];
    if (id < 0 || id >= store_.num_slots) return;
    const uint32_t slot_id = static_cast<uint32_t>(id);
    uint32_t* const slot = store_.slot(slot_id);
    const int64_t sampled = smaller<int64_t>(p_.num_sampled[i], row.length);
    if (!continues(slot, row)) {
      cpu::close_slot(store_, slot_id, &entering_);
      slot[kSlotLength] = static_cast<uint32_t>(row.length - sampled);
    }
    const int64_t from = slot[kSlotLength];
    const int64_t late = smaller(larger<int64_t>(row.length - sampled - from, 0), *backlog);
    *backlog -= late;
    const int64_t upto = smaller(row.length, from + late + sampled);
    const uint64_t seed = scope_seed(row.scope);
    for (int64_t at = from; at < upto;) at += write(slot, row, at, upto, seed);
  }

  // Whether the row continues the slot's request.
  bool continues(const uint32_t* slot, const Row& row) const {
    const uint32_t serial = slot[kSlotSerial], stored = slot[kSlotLength];
    if (!store_.alive(serial) || store_.scope(serial) != row.scope || stored > row.length) return false;
    const uint32_t fill = store_.fill(serial), n = smaller(fill, kOverlap);
    return n <= stored &&
           std::memcmp(store_.text(serial) + fill - n, row.tokens + stored - n, n * sizeof(int32_t)) == 0;
  }

  // Writes those of the tokens from `at` to `upto` that fit into the slot's block; returns their number.
  int64_t write(uint32_t* slot, const Row& row, int64_t at, int64_t upto, uint64_t seed) {
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
  void give_out(uint32_t* slot, uint64_t scope) {
    uint32_t* const header = store_.header;
    uint32_t before = slot[kSlotSerial];
    if (header[kHeaderNextSerial] == 0 || header[kHeaderNextSerial] >= kEndOfSerials) {
      cpu::forget_all(store_);
      store_.count(kStatRestarts);
      before = 0;
    }
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

  const NgramStoreStepParams& p_;
  const cpu::Store& store_;
  cpu::Entering entering_;
};

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const NgramStoreStepParams* params, void*) {
  cpu::Store store;
  if (!cpu::open_store(params->store.words, params->store.num_words, &store)) return kOk;
  if (const cpu::StoreUse use(store); use) {
    StoreStep(*params, store).run();
  } else {
    cpu::count_busy(store);
  }
  return kOk;
}
