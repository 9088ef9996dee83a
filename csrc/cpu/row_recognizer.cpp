#include "cpu/row_recognizer.h"

#include <algorithm>
#include <unordered_map>

namespace ngram_npu::cpu {

// Returns the position of token i of the fingerprint of a row of `length` >= 1 tokens. The first kTailTokens are the
// row's last tokens. The others are at the powers of four, so they do not change as the row grows and stay in the
// cache.
int32_t RowRecognizer::position(int32_t length, int i) {
  const int32_t last = length - 1;
  if (i < kTailTokens) return larger(last - i, 0);
  return smaller(int32_t{1} << (2 * (i - kTailTokens)), last);
}

// Returns all zeros if the length is not one of a row.
RowRecognizer::Fingerprint RowRecognizer::fingerprint(const Rows& rows, int64_t row, int32_t length) {
  Fingerprint fingerprint{};
  if (length < 1 || length > rows.capacity) return fingerprint;
  const int32_t* tokens = rows[row];
  for (int i = 0; i < kWidth; ++i) fingerprint[static_cast<size_t>(i)] = tokens[position(length, i)];
  return fingerprint;
}

uint64_t RowRecognizer::hash(int32_t length, const Fingerprint& fingerprint) {
  uint64_t h = static_cast<uint32_t>(length);
  for (const int32_t token : fingerprint) h = (h ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
  return h;
}

std::vector<RowRecognizer::Lengths> RowRecognizer::read_lengths(const Rows& rows, const int32_t* num_tokens,
                                                                const int32_t* num_sampled, int64_t batch) {
  std::vector<Lengths> lengths(static_cast<size_t>(batch));
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int32_t after = num_tokens[i];
    if (after < 0 || after > rows.capacity) continue;  // {0, 0}: a row with an invalid length has no request
    const bool is_valid_count = num_sampled[i] >= 0 && num_sampled[i] <= after;
    lengths[i] = {is_valid_count ? after - num_sampled[i] : 0, after};
  }
  return lengths;
}

// All allocations, which may throw, come before any change of the members.
std::vector<int64_t> RowRecognizer::assign(const Rows& rows, const int32_t* num_tokens, const int32_t* num_sampled,
                                           int64_t batch, int32_t* slots) {
  const std::vector<Lengths> lengths = read_lengths(rows, num_tokens, num_sampled, batch);
  std::fill(slots, slots + batch, kFree);
  find_unmoved(rows, lengths, slots);
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < batch; ++i) {
    if (slots[i] == kFree) missing.push_back(i);
  }
  if (!missing.empty()) {
    find_moved(rows, lengths, missing, absent_slots(slots, batch), slots);
    find_grown(rows, lengths, missing, absent_slots(slots, batch), slots);
    missing.erase(std::remove_if(missing.begin(), missing.end(), [&](int64_t i) { return slots[i] != kFree; }),
                  missing.end());
    assign_oldest_slots(missing, slots, batch);
  }
  row_slots_.reserve(lengths.size());
  ++step_;
  row_slots_.assign(slots, slots + batch);
  for (int64_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots[i]);
    const int32_t length = lengths[static_cast<size_t>(i)].after;
    slots_[slot].length = length;
    slots_[slot].fingerprint = fingerprint(rows, i, length);
    last_seen_[slot] = step_;
  }
  return missing;
}

std::vector<int32_t> RowRecognizer::free_absent_slots(int64_t steps) {
  std::vector<int32_t> absent;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (last_seen_[slot] > 0 && last_seen_[slot] < step_ - steps) absent.push_back(static_cast<int32_t>(slot));
  }
  for (const int32_t slot : absent) {
    slots_[static_cast<size_t>(slot)].length = kFree;
    last_seen_[static_cast<size_t>(slot)] = 0;
  }
  return absent;
}

// Whether the row may contain the slot's request.
bool RowRecognizer::may_continue(const Rows& rows, int64_t row, int32_t before, const Slot& slot) const {
  return slot.length > 0 && slot.length <= before && fingerprint(rows, row, slot.length) == slot.fingerprint;
}

// Finds the rows that contain the same request as in the previous step.
void RowRecognizer::find_unmoved(const Rows& rows, const std::vector<Lengths>& lengths, int32_t* slots) const {
  const size_t num_rows = smaller(lengths.size(), row_slots_.size());
  // Prefetches ahead, so that the cache misses of several rows overlap. The positions depend on the slot's length;
  // nearly always it is the row's length without the sampled tokens.
  constexpr size_t kPrefetchDistance = 8;
  const auto prefetch = [&](size_t i) {
    __builtin_prefetch(&slots_[static_cast<size_t>(row_slots_[i])], 1);
    const int32_t length = lengths[i].before;
    if (length < 1) return;
    const int32_t* tokens = rows[static_cast<int64_t>(i)];
    for (int p = kTailTokens - 1; p < kWidth; ++p) __builtin_prefetch(tokens + position(length, p));
    __builtin_prefetch(tokens + lengths[i].after - 1);
  };
  for (size_t i = 0; i < smaller(kPrefetchDistance, num_rows); ++i) prefetch(i);
  for (size_t i = 0; i < num_rows; ++i) {
    if (i + kPrefetchDistance < num_rows) prefetch(i + kPrefetchDistance);
    const int32_t slot = row_slots_[i];
    if (may_continue(rows, static_cast<int64_t>(i), lengths[i].before, slots_[static_cast<size_t>(slot)]))
      slots[i] = slot;
  }
}

std::vector<char> RowRecognizer::slots_in_use(const int32_t* slots, int64_t batch) const {
  std::vector<char> in_use(slots_.size());
  for (int64_t i = 0; i < batch; ++i) {
    if (slots[i] != kFree) in_use[static_cast<size_t>(slots[i])] = 1;
  }
  return in_use;
}

// Returns the slots with a request that has not been found in a row.
std::vector<int32_t> RowRecognizer::absent_slots(const int32_t* slots, int64_t batch) const {
  const std::vector<char> in_use = slots_in_use(slots, batch);
  std::vector<int32_t> absent;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].length > 0 && in_use[slot] == 0) absent.push_back(static_cast<int32_t>(slot));
  }
  return absent;
}

// Finds requests that moved to another row and grew by the sampled tokens. A hash table makes this faster than
// comparing each row with each slot.
void RowRecognizer::find_moved(const Rows& rows, const std::vector<Lengths>& lengths,
                               const std::vector<int64_t>& missing, const std::vector<int32_t>& absent,
                               int32_t* slots) const {
  std::unordered_map<uint64_t, std::vector<int32_t>> slots_by_hash;
  for (const int32_t slot : absent) {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    slots_by_hash[hash(s.length, s.fingerprint)].push_back(slot);
  }
  if (slots_by_hash.empty()) return;
  for (const int64_t i : missing) {
    const int32_t before = lengths[static_cast<size_t>(i)].before;
    if (before < 1) continue;
    const Fingerprint row_fingerprint = fingerprint(rows, i, before);
    const auto entry = slots_by_hash.find(hash(before, row_fingerprint));
    if (entry == slots_by_hash.end()) continue;
    std::vector<int32_t>& candidates = entry->second;
    for (size_t c = candidates.size(); c-- > 0;) {
      const Slot& s = slots_[static_cast<size_t>(candidates[c])];
      if (s.length != before || s.fingerprint != row_fingerprint) continue;
      slots[i] = candidates[c];
      candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(c));
      break;
    }
  }
}

// Finds requests that moved and grew by more than the sampled tokens, and rows that begin with an absent request's
// text. Longer slots are assigned first.
void RowRecognizer::find_grown(const Rows& rows, const std::vector<Lengths>& lengths,
                               const std::vector<int64_t>& missing, const std::vector<int32_t>& absent,
                               int32_t* slots) const {
  struct Pair {
    int64_t row;
    int32_t slot;
    size_t order;
  };
  std::vector<Pair> pairs;
  for (const int64_t i : missing) {
    const int32_t before = lengths[static_cast<size_t>(i)].before;
    if (slots[i] != kFree || before < 1) continue;
    const int32_t* tokens = rows[i];
    for (const int32_t slot : absent) {
      const Slot& s = slots_[static_cast<size_t>(slot)];
      // The comparison of one token excludes nearly all pairs.
      if (s.length > before || tokens[s.length - 1] != s.fingerprint[0]) continue;
      if (may_continue(rows, i, before, s)) pairs.push_back({i, slot, pairs.size()});
    }
  }
  const auto length = [this](const Pair& p) { return slots_[static_cast<size_t>(p.slot)].length; };
  std::sort(pairs.begin(), pairs.end(), [&](const Pair& a, const Pair& b) {
    return length(a) != length(b) ? length(a) > length(b) : a.order < b.order;
  });
  std::vector<char> is_taken(slots_.size());
  for (const Pair& p : pairs) {
    if (slots[p.row] != kFree || is_taken[static_cast<size_t>(p.slot)] != 0) continue;
    slots[p.row] = p.slot;
    is_taken[static_cast<size_t>(p.slot)] = 1;
  }
}

// Assigns slots that have no row in this step to `rows`: free slots first, then those of the requests absent longest.
void RowRecognizer::assign_oldest_slots(const std::vector<int64_t>& rows, int32_t* slots, int64_t batch) const {
  if (rows.empty()) return;
  const std::vector<char> in_use = slots_in_use(slots, batch);
  std::vector<int32_t> order;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (in_use[slot] == 0) order.push_back(static_cast<int32_t>(slot));
  }
  const auto is_older = [this](int32_t a, int32_t b) {
    const int64_t x = last_seen_[static_cast<size_t>(a)], y = last_seen_[static_cast<size_t>(b)];
    return x != y ? x < y : a < b;
  };
  const auto count = static_cast<std::ptrdiff_t>(rows.size());
  std::partial_sort(order.begin(), order.begin() + count, order.end(), is_older);
  for (size_t i = 0; i < rows.size(); ++i) slots[rows[i]] = order[i];
}

}  // namespace ngram_npu::cpu
