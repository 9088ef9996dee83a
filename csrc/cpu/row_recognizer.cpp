// Implements row_recognizer.h.
#include "cpu/row_recognizer.h"

#include <algorithm>
#include <unordered_map>

namespace ngram_npu::cpu {

// Returns the position of token i of the fingerprint of a row of `length` >= 1 tokens. The first kTailTokens tokens of
// the fingerprint are the row's last tokens. The others are at the powers of four; these tokens do not change as the
// row grows, so they stay in the cache.
int32_t RowRecognizer::fingerprint_position(int32_t length, int i) {
  const int32_t last = length - 1;
  if (i < kTailTokens) return larger(last - i, 0);
  return smaller(int32_t{1} << (2 * (i - kTailTokens)), last);
}

// Returns all zeros if the length is not the length of a row.
RowRecognizer::Fingerprint RowRecognizer::compute_fingerprint(const Rows& rows, int64_t row, int32_t length) {
  Fingerprint fingerprint{};
  if (length < 1 || length > rows.capacity) return fingerprint;
  const int32_t* tokens = rows[row];
  for (int i = 0; i < kWidth; ++i) fingerprint[static_cast<size_t>(i)] = tokens[fingerprint_position(length, i)];
  return fingerprint;
}

uint64_t RowRecognizer::compute_hash(int32_t length, const Fingerprint& fingerprint) {
  uint64_t hash_value = static_cast<uint32_t>(length);
  for (const int32_t token : fingerprint)
    hash_value = (hash_value ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
  return hash_value;
}

std::vector<RowRecognizer::Lengths> RowRecognizer::read_lengths(const Rows& rows, const int32_t* num_tokens,
                                                                const int32_t* num_sampled, int64_t batch) {
  std::vector<Lengths> lengths(static_cast<size_t>(batch));
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int32_t new_length = num_tokens[i];
    if (new_length < 0 || new_length > rows.capacity) continue;  // {0, 0}: a row with an invalid length has no request
    const bool is_valid_count = num_sampled[i] >= 0 && num_sampled[i] <= new_length;
    lengths[i] = {is_valid_count ? new_length - num_sampled[i] : 0, new_length};
  }
  return lengths;
}

// All allocations, which may throw, come before any change of the members.
std::vector<int64_t> RowRecognizer::assign_slots(const Rows& rows, const int32_t* num_tokens,
                                                 const int32_t* num_sampled, int64_t batch, int32_t* slots) {
  const std::vector<Lengths> lengths = read_lengths(rows, num_tokens, num_sampled, batch);
  std::fill(slots, slots + batch, kFree);
  find_unmoved_requests(rows, lengths, slots);
  std::vector<int64_t> rows_without_slot;
  for (int64_t i = 0; i < batch; ++i) {
    if (slots[i] == kFree) rows_without_slot.push_back(i);
  }
  if (!rows_without_slot.empty()) {
    find_moved_requests(rows, lengths, rows_without_slot, find_absent_slots(slots, batch), slots);
    find_requests_that_grew_by_more(rows, lengths, rows_without_slot, find_absent_slots(slots, batch), slots);
    rows_without_slot.erase(std::remove_if(rows_without_slot.begin(), rows_without_slot.end(),
                                           [&](int64_t i) { return slots[i] != kFree; }),
                            rows_without_slot.end());
    assign_oldest_slots(rows_without_slot, slots, batch);
  }
  row_slots_.reserve(lengths.size());
  ++step_;
  row_slots_.assign(slots, slots + batch);
  for (int64_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots[i]);
    const int32_t length = lengths[static_cast<size_t>(i)].new_length;
    slots_[slot].length = length;
    slots_[slot].fingerprint = compute_fingerprint(rows, i, length);
    last_seen_[slot] = step_;
  }
  return rows_without_slot;
}

std::vector<int32_t> RowRecognizer::free_absent_slots(int64_t steps) {
  std::vector<int32_t> absent_slots;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (last_seen_[slot] > 0 && last_seen_[slot] < step_ - steps) absent_slots.push_back(static_cast<int32_t>(slot));
  }
  for (const int32_t slot : absent_slots) {
    slots_[static_cast<size_t>(slot)].length = kFree;
    last_seen_[static_cast<size_t>(slot)] = 0;
  }
  return absent_slots;
}

// Whether the row may contain the slot's request. old_length is the row's length without the newly sampled tokens.
bool RowRecognizer::may_continue(const Rows& rows, int64_t row, int32_t old_length, const Slot& slot) const {
  return slot.length > 0 && slot.length <= old_length &&
         compute_fingerprint(rows, row, slot.length) == slot.fingerprint;
}

// Finds the rows that contain the same request as in the previous step.
void RowRecognizer::find_unmoved_requests(const Rows& rows, const std::vector<Lengths>& lengths, int32_t* slots) const {
  const size_t num_rows = smaller(lengths.size(), row_slots_.size());
  // Prefetches ahead, so that the cache misses of several rows overlap. The positions depend on the slot's length;
  // nearly always it is the row's length without the sampled tokens.
  constexpr size_t kPrefetchDistance = 8;
  const auto prefetch = [&](size_t i) {
    __builtin_prefetch(&slots_[static_cast<size_t>(row_slots_[i])], 1);
    const int32_t length = lengths[i].old_length;
    if (length < 1) return;
    const int32_t* tokens = rows[static_cast<int64_t>(i)];
    for (int p = kTailTokens - 1; p < kWidth; ++p) __builtin_prefetch(tokens + fingerprint_position(length, p));
    __builtin_prefetch(tokens + lengths[i].new_length - 1);
  };
  for (size_t i = 0; i < smaller(kPrefetchDistance, num_rows); ++i) prefetch(i);
  for (size_t i = 0; i < num_rows; ++i) {
    if (i + kPrefetchDistance < num_rows) prefetch(i + kPrefetchDistance);
    const int32_t slot = row_slots_[i];
    if (may_continue(rows, static_cast<int64_t>(i), lengths[i].old_length, slots_[static_cast<size_t>(slot)]))
      slots[i] = slot;
  }
}

std::vector<char> RowRecognizer::find_slots_in_use(const int32_t* slots, int64_t batch) const {
  std::vector<char> in_use(slots_.size());
  for (int64_t i = 0; i < batch; ++i) {
    if (slots[i] != kFree) in_use[static_cast<size_t>(slots[i])] = 1;
  }
  return in_use;
}

// Returns the slots with a request that has not been found in a row.
std::vector<int32_t> RowRecognizer::find_absent_slots(const int32_t* slots, int64_t batch) const {
  const std::vector<char> in_use = find_slots_in_use(slots, batch);
  std::vector<int32_t> absent_slots;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].length > 0 && in_use[slot] == 0) absent_slots.push_back(static_cast<int32_t>(slot));
  }
  return absent_slots;
}

// Finds requests that moved to another row and grew by the sampled tokens. A hash table makes this faster than
// comparing each row with each slot.
void RowRecognizer::find_moved_requests(const Rows& rows, const std::vector<Lengths>& lengths,
                                        const std::vector<int64_t>& rows_without_slot,
                                        const std::vector<int32_t>& absent_slots, int32_t* slots) const {
  std::unordered_map<uint64_t, std::vector<int32_t>> slots_by_hash;
  for (const int32_t slot : absent_slots) {
    const Slot& candidate = slots_[static_cast<size_t>(slot)];
    slots_by_hash[compute_hash(candidate.length, candidate.fingerprint)].push_back(slot);
  }
  if (slots_by_hash.empty()) return;
  for (const int64_t i : rows_without_slot) {
    const int32_t old_length = lengths[static_cast<size_t>(i)].old_length;
    if (old_length < 1) continue;
    const Fingerprint row_fingerprint = compute_fingerprint(rows, i, old_length);
    const auto entry = slots_by_hash.find(compute_hash(old_length, row_fingerprint));
    if (entry == slots_by_hash.end()) continue;
    std::vector<int32_t>& candidates = entry->second;
    for (size_t c = candidates.size(); c-- > 0;) {
      const Slot& candidate = slots_[static_cast<size_t>(candidates[c])];
      if (candidate.length != old_length || candidate.fingerprint != row_fingerprint) continue;
      slots[i] = candidates[c];
      candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(c));
      break;
    }
  }
}

// Finds requests that moved and grew by more than the sampled tokens, and rows that begin with an absent request's
// text. Slots with a longer text are assigned first.
void RowRecognizer::find_requests_that_grew_by_more(const Rows& rows, const std::vector<Lengths>& lengths,
                                                    const std::vector<int64_t>& rows_without_slot,
                                                    const std::vector<int32_t>& absent_slots, int32_t* slots) const {
  struct Pair {
    int64_t row;
    int32_t slot;
    size_t order;
  };
  std::vector<Pair> pairs;
  for (const int64_t i : rows_without_slot) {
    const int32_t old_length = lengths[static_cast<size_t>(i)].old_length;
    if (slots[i] != kFree || old_length < 1) continue;
    const int32_t* tokens = rows[i];
    for (const int32_t slot : absent_slots) {
      const Slot& candidate = slots_[static_cast<size_t>(slot)];
      // The comparison of one token excludes nearly all pairs.
      if (candidate.length > old_length || tokens[candidate.length - 1] != candidate.fingerprint[0]) continue;
      if (may_continue(rows, i, old_length, candidate)) pairs.push_back({i, slot, pairs.size()});
    }
  }
  const auto slot_length = [this](const Pair& pair) { return slots_[static_cast<size_t>(pair.slot)].length; };
  std::sort(pairs.begin(), pairs.end(), [&](const Pair& a, const Pair& b) {
    return slot_length(a) != slot_length(b) ? slot_length(a) > slot_length(b) : a.order < b.order;
  });
  std::vector<char> is_taken(slots_.size());
  for (const Pair& pair : pairs) {
    if (slots[pair.row] != kFree || is_taken[static_cast<size_t>(pair.slot)] != 0) continue;
    slots[pair.row] = pair.slot;
    is_taken[static_cast<size_t>(pair.slot)] = 1;
  }
}

// Assigns slots that have no row in this step to `rows`: free slots first, then those of the longest absent requests.
void RowRecognizer::assign_oldest_slots(const std::vector<int64_t>& rows, int32_t* slots, int64_t batch) const {
  if (rows.empty()) return;
  const std::vector<char> in_use = find_slots_in_use(slots, batch);
  std::vector<int32_t> unused_slots;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (in_use[slot] == 0) unused_slots.push_back(static_cast<int32_t>(slot));
  }
  const auto is_older = [this](int32_t a, int32_t b) {
    const int64_t x = last_seen_[static_cast<size_t>(a)], y = last_seen_[static_cast<size_t>(b)];
    return x != y ? x < y : a < b;
  };
  const auto count = static_cast<std::ptrdiff_t>(rows.size());
  std::partial_sort(unused_slots.begin(), unused_slots.begin() + count, unused_slots.end(), is_older);
  for (size_t i = 0; i < rows.size(); ++i) slots[rows[i]] = unused_slots[i];
}

}  // namespace ngram_npu::cpu
