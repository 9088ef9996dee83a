// Finds out which request is in which row, since vLLM does not tell a custom class.
//
// A custom class gets no request ids, and the runner moves rows: it swaps and condenses them when requests finish,
// removes preempted requests, and puts them into other rows later. An engine with state per request (an index) has to
// find the request again. A row is taken to hold the request of a slot if
//
// - its length without the newly sampled tokens is at least the slot's length, and
// - the tokens at up to 14 positions below the slot's length are the slot's: the last six, and those at the powers of
//   four up to 16384.
//
// The row may have grown by more than the sampled tokens: vLLM does not call the drafter in steps in which any request
// is within k tokens of max_model_len, although rows grow in them. So the next turn of a conversation continues with
// the slot of its previous turn, if it still exists. An absent request keeps its slot until the slot is needed; the
// request absent longest loses its slot first.
//
// Limits: a request that has the tokens of another at all of these positions, but differs elsewhere, may get the other
// request's slot if they swap rows or if the other one is gone. The index then describes another request's tokens. Hits
// are verified against the row, and drafts by the model, so the result is a missed or a worse draft, never a wrong
// token. Requests that are equal up to the slot's length (n samples of one prompt) may swap slots without any effect.
#include <algorithm>
#include <array>
#include <unordered_map>
#include <vector>

#include "api/numpy/module.h"
#include "api/numpy/numpy_call.h"

namespace ngram_npu::numpy {
namespace {

using Rows = TokenRows<const int32_t>;

constexpr const char* kName = "RowRecognizer";
constexpr int kTail = 6, kPowers = 8, kWidth = kTail + kPowers;
constexpr int32_t kFree = -1;

using Print = std::array<int32_t, kWidth>;

// One cache line: if no request has moved, a row costs only this line and the reads of its tokens.
struct alignas(64) Slot {
  int32_t length = kFree;
  Print print{};  // of the request at that length
};

struct Lengths {
  int32_t before;  // length without the newly sampled tokens
  int32_t after;
};

// Position i of the fingerprint of a row of `length` >= 1 tokens: its last tokens, then those at the powers of four,
// which do not move while it grows and so stay in the cache.
int32_t place(int32_t length, int i) {
  const int32_t last = length - 1;
  if (i < kTail) return larger(last - i, 0);
  return smaller(int32_t{1} << (2 * (i - kTail)), last);
}

// All zeros for a length that the row does not have.
Print fingerprint(const Rows& rows, int64_t row, int32_t length) {
  Print print{};
  if (length < 1 || length > rows.capacity) return print;
  const int32_t* tokens = rows[row];
  for (int i = 0; i < kWidth; ++i) print[static_cast<size_t>(i)] = tokens[place(length, i)];
  return print;
}

class RowRecognizer {
 public:
  explicit RowRecognizer(int64_t num_slots) {
    api::Arguments(kName).scalar("num_slots", num_slots, 0, INT32_MAX);
    slots_.resize(static_cast<size_t>(num_slots));
    last_seen_.resize(slots_.size());
  }

  py::tuple assign(py::handle token_ids, py::handle num_tokens, py::handle num_sampled) {
    NumpyCall call(kName);
    const api::TensorView lengths = call("num_tokens", num_tokens);
    const int32_t* ends = call.int32s(lengths, -1);
    const int64_t batch = lengths.sizes[0];
    const int32_t* counts = call.int32s(call("num_sampled", num_sampled), batch);
    const Rows rows = call.rows<const int32_t>(call("token_ids", token_ids));
    if (rows.rows < batch) call.fail("token_ids", std::to_string(batch) + " rows", std::to_string(rows.rows));
    if (batch > static_cast<int64_t>(slots_.size())) {
      call.fail("num_tokens", "at most " + std::to_string(slots_.size()) + " rows, the number of slots",
                std::to_string(batch));
    }
    std::vector<Lengths> grown(static_cast<size_t>(batch));
    for (size_t i = 0; i < grown.size(); ++i) {
      const int32_t after = ends[i];
      if (after < 0 || after > rows.capacity) continue;  // not a length: a row without a request, {0, 0}
      grown[i] = {counts[i] < 0 || counts[i] > after ? 0 : after - counts[i], after};
    }
    py::array_t<int32_t> slots(batch);
    const std::vector<int64_t> fresh = recognize(rows, grown, slots.mutable_data());
    py::array_t<int64_t> new_rows(static_cast<py::ssize_t>(fresh.size()));
    std::copy(fresh.begin(), fresh.end(), new_rows.mutable_data());
    return py::make_tuple(std::move(slots), std::move(new_rows));
  }

  py::array_t<int32_t> forget_absent(int64_t steps) {
    api::Arguments(kName).scalar("steps", steps, 0, INT32_MAX);
    std::vector<int32_t> absent;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (last_seen_[slot] > 0 && last_seen_[slot] < step_ - steps) absent.push_back(static_cast<int32_t>(slot));
    }
    py::array_t<int32_t> found(static_cast<py::ssize_t>(absent.size()));
    std::copy(absent.begin(), absent.end(), found.mutable_data());
    for (const int32_t slot : absent) {
      slots_[static_cast<size_t>(slot)].length = kFree;
      last_seen_[static_cast<size_t>(slot)] = 0;
    }
    return found;
  }

  py::array_t<int32_t> row_slots() const {
    return py::array_t<int32_t>(static_cast<py::ssize_t>(row_slots_.size()), row_slots_.data());
  }

 private:
  // Everything that may throw comes before any change.
  std::vector<int64_t> recognize(const Rows& rows, const std::vector<Lengths>& grown, int32_t* found) {
    const int64_t batch = static_cast<int64_t>(grown.size());
    std::fill(found, found + batch, kFree);
    find_unmoved(rows, grown, found);
    std::vector<int64_t> missing;
    for (int64_t i = 0; i < batch; ++i) {
      if (found[i] == kFree) missing.push_back(i);
    }
    if (!missing.empty()) {
      std::vector<int32_t> absent = absent_slots(found, batch);
      find_moved(rows, grown, missing, absent, found);
      absent = absent_slots(found, batch);
      find_grown(rows, grown, missing, absent, found);
      missing.erase(std::remove_if(missing.begin(), missing.end(), [&](int64_t i) { return found[i] != kFree; }),
                    missing.end());
      take_oldest(missing, found, batch);
    }
    row_slots_.reserve(grown.size());
    ++step_;
    row_slots_.assign(found, found + batch);
    for (int64_t i = 0; i < batch; ++i) {
      const auto slot = static_cast<size_t>(found[i]);
      const int32_t length = grown[static_cast<size_t>(i)].after;
      slots_[slot].length = length;
      slots_[slot].print = fingerprint(rows, i, length);
      last_seen_[slot] = step_;
    }
    return missing;
  }

  // Whether the row may be the slot's request after it has grown.
  bool fits(const Rows& rows, int64_t row, int32_t before, const Slot& slot) const {
    return slot.length > 0 && slot.length <= before && fingerprint(rows, row, slot.length) == slot.print;
  }

  // Finds rows with the same request as in the previous step.
  void find_unmoved(const Rows& rows, const std::vector<Lengths>& grown, int32_t* found) const {
    const size_t known = smaller(grown.size(), row_slots_.size());
    // Prefetches ahead, so that the cache misses of several rows overlap. The positions depend on the slot's length;
    // nearly always it is the row's length without the sampled tokens.
    constexpr size_t kAhead = 8;
    const auto prefetch = [&](size_t i) {
      __builtin_prefetch(&slots_[static_cast<size_t>(row_slots_[i])], 1);
      const int32_t length = grown[i].before;
      if (length < 1) return;
      const int32_t* tokens = rows[static_cast<int64_t>(i)];
      for (int p = kTail - 1; p < kWidth; ++p) __builtin_prefetch(tokens + place(length, p));
      __builtin_prefetch(tokens + grown[i].after - 1);
    };
    for (size_t i = 0; i < smaller(kAhead, known); ++i) prefetch(i);
    for (size_t i = 0; i < known; ++i) {
      if (i + kAhead < known) prefetch(i + kAhead);
      const int32_t slot = row_slots_[i];
      if (fits(rows, static_cast<int64_t>(i), grown[i].before, slots_[static_cast<size_t>(slot)])) found[i] = slot;
    }
  }

  // Slots whose requests have not been found in a row.
  std::vector<int32_t> absent_slots(const int32_t* found, int64_t batch) const {
    std::vector<char> taken(slots_.size());
    for (int64_t i = 0; i < batch; ++i) {
      if (found[i] != kFree) taken[static_cast<size_t>(found[i])] = 1;
    }
    std::vector<int32_t> absent;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_[slot].length > 0 && taken[slot] == 0) absent.push_back(static_cast<int32_t>(slot));
    }
    return absent;
  }

  // Finds moved rows that grew by the sampled tokens, in less than O(rows * slots) time.
  void find_moved(const Rows& rows, const std::vector<Lengths>& grown, const std::vector<int64_t>& missing,
                  const std::vector<int32_t>& absent, int32_t* found) const {
    std::unordered_map<uint64_t, std::vector<int32_t>> by_print;
    for (const int32_t slot : absent) {
      const Slot& s = slots_[static_cast<size_t>(slot)];
      by_print[hash(s.length, s.print)].push_back(slot);
    }
    if (by_print.empty()) return;
    for (const int64_t i : missing) {
      const int32_t before = grown[static_cast<size_t>(i)].before;
      if (before < 1) continue;
      const Print print = fingerprint(rows, i, before);
      const auto entry = by_print.find(hash(before, print));
      if (entry == by_print.end()) continue;
      std::vector<int32_t>& candidates = entry->second;
      for (size_t c = candidates.size(); c-- > 0;) {
        const Slot& s = slots_[static_cast<size_t>(candidates[c])];
        if (s.length != before || s.print != print) continue;
        found[i] = candidates[c];
        candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(c));
        break;
      }
    }
  }

  // Finds rows that moved and also grew without being seen, or that begin with another row's text: longest slot first.
  void find_grown(const Rows& rows, const std::vector<Lengths>& grown, const std::vector<int64_t>& missing,
                  const std::vector<int32_t>& absent, int32_t* found) const {
    struct Pair {
      int64_t row;
      int32_t slot;
      size_t order;
    };
    std::vector<Pair> pairs;
    for (const int64_t i : missing) {
      const int32_t before = grown[static_cast<size_t>(i)].before;
      if (found[i] != kFree || before < 1) continue;
      const int32_t* tokens = rows[i];
      for (const int32_t slot : absent) {
        const Slot& s = slots_[static_cast<size_t>(slot)];
        // This one token rules out nearly all pairs.
        if (s.length > before || tokens[s.length - 1] != s.print[0]) continue;
        if (fits(rows, i, before, s)) pairs.push_back({i, slot, pairs.size()});
      }
    }
    const auto length = [this](const Pair& p) { return slots_[static_cast<size_t>(p.slot)].length; };
    std::sort(pairs.begin(), pairs.end(), [&](const Pair& a, const Pair& b) {
      return length(a) != length(b) ? length(a) > length(b) : a.order < b.order;
    });
    std::vector<char> taken(slots_.size());
    for (const Pair& p : pairs) {
      if (found[p.row] != kFree || taken[static_cast<size_t>(p.slot)] != 0) continue;
      found[p.row] = p.slot;
      taken[static_cast<size_t>(p.slot)] = 1;
    }
  }

  // Takes slots without a row in this step: free ones first, then those absent longest.
  void take_oldest(const std::vector<int64_t>& rows, int32_t* found, int64_t batch) const {
    if (rows.empty()) return;
    std::vector<char> taken(slots_.size());
    for (int64_t i = 0; i < batch; ++i) {
      if (found[i] != kFree) taken[static_cast<size_t>(found[i])] = 1;
    }
    std::vector<int32_t> order;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (taken[slot] == 0) order.push_back(static_cast<int32_t>(slot));
    }
    const auto older = [this](int32_t a, int32_t b) {
      const int64_t x = last_seen_[static_cast<size_t>(a)], y = last_seen_[static_cast<size_t>(b)];
      return x != y ? x < y : a < b;
    };
    const auto count = static_cast<std::ptrdiff_t>(rows.size());
    std::partial_sort(order.begin(), order.begin() + count, order.end(), older);
    for (size_t i = 0; i < rows.size(); ++i) found[rows[i]] = order[i];
  }

  static uint64_t hash(int32_t length, const Print& print) {
    uint64_t h = static_cast<uint32_t>(length);
    for (const int32_t token : print) h = (h ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    return h;
  }

  std::vector<Slot> slots_;
  std::vector<int64_t> last_seen_;  // 0: never, or forgotten
  std::vector<int32_t> row_slots_;  // of the previous step
  int64_t step_ = 0;
};

}  // namespace

void define_row_recognizer(py::module_& m) {
  py::class_<RowRecognizer>(m, kName)
      .def(py::init<int64_t>(), py::arg("num_slots"))
      .def("assign", &RowRecognizer::assign, py::arg("token_ids"), py::arg("num_tokens"), py::arg("num_sampled"))
      .def("forget_absent", &RowRecognizer::forget_absent, py::arg("steps"))
      .def_property_readonly("row_slots", &RowRecognizer::row_slots)
      .def("__copy__", [](const RowRecognizer& self) { return RowRecognizer(self); });
}

}  // namespace ngram_npu::numpy
