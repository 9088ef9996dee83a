// Rows with an index between guard pages, driven by choices that are random or a fuzzer's, and compared with the
// definitions. No gtest here: the fuzz target has none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "choices.h"
#include "core/draft_costs.h"
#include "core/ngram_index_layout.h"
#include "entry_points.h"
#include "guard_pages.h"
#include "oracle.h"

namespace ngram_npu::test {

// One index and its rows. Some rows are long enough to fill several pages. Functions return an error after an event as
// text, or null.
class IndexEpisode {
 public:
  // corrupt: overwrites the index's words between events; drafts then only have to stay within the row.
  IndexEpisode(Choices& choices, Flush flush, bool corrupt)
      : c_(choices),
        corrupt_(corrupt),
        rows_(c_.from(1, 4)),
        capacity_(c_.one_in(3) ? 8 * index::kPageWords : c_.from(2, 90)),
        width_(c_.from(1, 4)),
        alphabet_(c_.from(1, c_.one_in(2) ? 4 : 250)),
        pages_(c_.one_in(3) ? c_.from(1, 12) : 64),
        k_(c_.from(1, 5)),
        words_(ngram_npu_cpu_ngram_index_words(rows_, pages_)),
        tokens_(rows_, capacity_, flush),
        sampled_(rows_, width_, flush),
        lengths_(rows_, flush),
        index_(words_, flush),
        row_indices_(rows_, flush),
        slot_indices_(rows_, flush),
        costs_(kCostRows * kCostColumns, flush),
        draft_costs_(rows_, k_, flush),
        slots_(static_cast<size_t>(rows_)),
        depths_(static_cast<size_t>(rows_)) {
    look_.min_n = c_.from(1, 4);
    look_.max_n = look_.min_n + c_.below(index::kMaxLevels);
    look_.k = k_;
    look_.max_len = c_.one_in(4) ? c_.from(0, capacity_) : int64_t{1} << 40;
    look_.match_policy = static_cast<int32_t>(c_.below(2));
    look_.overlap = c_.one_in(2);
    if (c_.one_in(3)) draw_ladder();
    std::fill_n(index_.data(), words_, 0);
    std::fill_n(lengths_.data(), rows_, 0);
    for (int64_t r = 0; r < rows_; ++r) {
      slots_[static_cast<size_t>(r)] = r;
      std::fill_n(tokens_[r], capacity_, 0);
    }
    ngram_npu_cpu_ngram_index_init(index_.data(), words_, rows_);
  }

  const char* run() {
    while (c_.more()) {
      if (const char* error = event()) return error;
    }
    if (!tokens_.is_intact() || !lengths_.is_intact() || !index_.is_intact() || !draft_costs_.is_intact()) {
      return "memory outside a tensor was written";
    }
    return corrupt_ ? nullptr : check();
  }

  const EventCounts& event_counts() const { return event_counts_; }

 private:
  void draw_ladder() {
    ladder_.enabled = true;
    look_.min_n = 1;
    look_.max_n = kLadderMaxN;
    look_.match_policy = kLatest;
    if (c_.one_in(4)) return;
    ladder_.costs = costs_.data();
    ladder_.cost_limit = c_.below(150);
    const auto seed = c_.below(256);
    for (int64_t i = 0; i < costs_.size(); ++i) costs_.data()[i] = static_cast<uint8_t>((i + 1) * (2 * seed + 1) % 61);
    costs_.forbid_writes();
    if (c_.one_in(4)) return;
    costs_to_ = {draft_costs_[0], draft_costs_.view().stride};
  }

  const char* event() {
    const int64_t row = c_.below(rows_);
    switch (c_.below(9)) {
      case 0: write(row); break;
      case 1:
        write(row);
        append();
        break;
      case 2:  // another request
        lengths_.data()[row] = 0;
        reset(slots_[static_cast<size_t>(row)]);
        write(row);
        break;
      case 3:  // a cut, reported at once
        lengths_.data()[row] = static_cast<int32_t>(c_.from(0, lengths_.data()[row]));
        append();
        break;
      case 4:  // another request without a reset of its slot: its tokens differ from all before
        lengths_.data()[row] = 0;
        lowest_ += 1000;
        write(row);
        break;
      case 5: {  // rows change places, slots with them
        const int64_t other = c_.below(rows_);
        std::swap_ranges(tokens_[row], tokens_[row] + capacity_, tokens_[other]);
        std::swap(lengths_.data()[row], lengths_.data()[other]);
        std::swap(slots_[static_cast<size_t>(row)], slots_[static_cast<size_t>(other)]);
        break;
      }
      default: break;
    }
    if (corrupt_) damage();
    for (int64_t i = c_.from(1, 4); i > 0; --i) {
      if (const char* error = step()) return error;
    }
    return nullptr;
  }

  // Random tokens, or a copy of what the row has. A few choices make a long stretch.
  void write(int64_t row) {
    int32_t& length = lengths_.data()[row];
    const bool copies = length > 4 && c_.one_in(2);
    const int64_t from = copies ? c_.below(length) : 0;
    const bool stretch = c_.one_in(2);
    const int64_t size = std::min<int64_t>(c_.below(stretch ? capacity_ : 40), capacity_ - length);
    uint64_t state = stretch ? static_cast<uint64_t>(c_.below(65536)) : 0;
    for (int64_t i = 0; i < size; ++i) {
      state = state * 0x5851f42d4c957f2du + 0x14057b7ef767814fu;
      const auto random = static_cast<int64_t>(state >> 33) % alphabet_;
      tokens_[row][length + i] =
          copies ? tokens_[row][from + i] : static_cast<int32_t>(lowest_ + (stretch ? random : c_.below(alphabet_)));
    }
    length += static_cast<int32_t>(size);
  }

  void append() {
    for (int64_t r = 0; r < rows_; ++r) slot_indices_.data()[r] = slots_[static_cast<size_t>(r)];
    const NgramIndexAppendParams p{tokens_.view<const int32_t>(),
                                   lengths_.data(),
                                   {},
                                   rows_,
                                   look_.min_n,
                                   look_.max_n,
                                   look_.match_policy,
                                   ladder_.enabled,
                                   ladder_.costs != nullptr,
                                   {index_.data(), words_, {slot_indices_.data(), 8}},
                                   nullptr};
    ngram_npu_cpu_ngram_index_append_(&p, nullptr);
    observe();
  }

  void reset(int64_t slot) {
    slot_indices_.data()[0] = slot;
    const NgramIndexResetParams p{{index_.data(), words_, {slot_indices_.data(), 8}}, 1};
    ngram_npu_cpu_ngram_index_reset_(&p, nullptr);
    observe();
  }

  // Counts the effects of the last call; pages taken and freed in one call are not visible.
  void observe() {
    if (corrupt_) return;
    const int32_t* words = index_.data();
    event_counts_["page splits"] = words[index::kStatSplits];
    event_counts_["slots rebuilt for other tokens"] = words[index::kStatRebuildTokens];
    event_counts_["slots disabled"] = words[index::kStatDisabled];
    event_counts_["page releases"] += std::max(0, pages_in_use_ - words[index::kHeaderPagesInUse]);
    pages_in_use_ = words[index::kHeaderPagesInUse];
    for (size_t slot = 0; slot < depths_.size(); ++slot) {
      const int32_t* const state = state_of(static_cast<int64_t>(slot));
      const int32_t depth = state[index::kSlotDepth];
      event_counts_["outcomes on several pages"] += state[index::kSlotOutcomePages] > 1;
      constexpr auto kInSlot = static_cast<int32_t>(index::kRootDepth);
      event_counts_["directory doublings"] += std::max(0, depth - depths_[slot]);
      event_counts_["directories on pages"] += depth > kInSlot && depths_[slot] <= kInSlot;
      depths_[slot] = depth;
    }
  }

  const int32_t* state_of(int64_t slot) const { return index_.data() + index::kHeaderWords + slot * index::kSlotWords; }

  void damage() {
    const int64_t before_pages = words_ - pages_ * index::kPageWords;
    const int64_t kind = c_.below(6);
    if (kind == 0) return;
    const int64_t from = kind == 1 ? 0 : kind == 2 ? index::kHeaderWords : before_pages;
    const int64_t to = kind == 1 ? 8 : kind == 2 ? before_pages : words_;
    for (int64_t times = kind < 3 ? c_.from(1, 6) : c_.from(1, 60); times > 0; --times) {
      const int64_t at = from + (c_.below(256) * 257 + c_.below(256)) % (to - from);
      if (kind == 5) {
        index_.data()[at] = index_.data()[at] ^ (1 << c_.below(31));
      } else {
        index_.data()[at] = static_cast<int32_t>(c_.one_in(2) ? c_.below(600) : c_.below(int64_t{1} << 32));
      }
    }
  }

  const char* step() {
    const int64_t batch = c_.from(1, rows_);
    const int64_t first = c_.below(rows_);
    const bool advance = c_.one_in(2);
    std::vector<Tokens> rows;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t row = (first + i) % rows_;
      row_indices_.data()[i] = row;
      slot_indices_.data()[i] = slots_[static_cast<size_t>(row)];
      for (int64_t j = 0; j < width_; ++j) sampled_[i][j] = static_cast<int32_t>(c_.from(-1, alphabet_ - 1));
      rows.emplace_back(tokens_[row], tokens_[row] + lengths_.data()[row]);
    }
    const auto size = static_cast<size_t>(batch);
    Tokens next(size), num_sampled(size), drafts(size * static_cast<size_t>(look_.k)), num_draft(size), match_len(size);
    const int64_t catch_up_tokens = c_.one_in(3) ? c_.below(50) : -1;
    const auto fill = [&](auto& p, auto& lookup) {
      p.index = {index_.data(), words_, {slot_indices_.data(), 8}};
      p.catch_up_tokens = catch_up_tokens;
      p.ladder = ladder_;
      lookup.num_tokens = lengths_.data();
      lookup.num_sampled = num_sampled.data();
      lookup.row_indices = {row_indices_.data(), 8};
      lookup.batch = batch;
      lookup.lookup = look_;
      lookup.draft_token_ids = {drafts.data(), look_.k, 4};
      lookup.draft_costs = costs_to_;
      lookup.num_draft_tokens = num_draft.data();
      lookup.match_len = match_len.data();
    };
    if (c_.one_in(4)) {  // the runner appends before it asks
      for (int64_t i = 0; i < batch; ++i) {
        const auto at = static_cast<size_t>(i);
        const int64_t row = row_indices_.data()[i];
        int32_t& length = lengths_.data()[row];
        if (length > 0) next[at] = tokens_[row][length - 1];
        for (; num_sampled[at] < width_ && sampled_[i][num_sampled[at]] >= 0; ++num_sampled[at]) {
          next[at] = sampled_[i][num_sampled[at]];
          if (length < capacity_) tokens_[row][length++] = next[at];
        }
      }
      NgramIndexProposeParams p{};
      p.propose.token_ids = tokens_.view<const int32_t>();
      fill(p, p.propose);
      ngram_npu_cpu_ngram_index_propose_(&p, nullptr);
    } else {
      NgramIndexStepParams p{};
      p.step.token_ids = tokens_.view();
      p.step.sampled_token_ids = sampled_.view<const int32_t>();
      p.step.advance = advance;
      p.step.vocab_size = 1000;
      p.step.next_token_ids = next.data();
      fill(p, p.step);
      ngram_npu_cpu_ngram_index_step_(&p, nullptr);
    }
    observe();
    for (int64_t i = 0; i < batch; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t row = row_indices_.data()[i];
      Tokens& t = rows[at];
      int32_t run = 0;
      while (run < width_ && sampled_[i][run] >= 0) ++run;
      for (int32_t j = 0; j < run && length_of(t) < capacity_; ++j) t.push_back(sampled_[i][j]);
      if (num_sampled[at] != run) return "num_sampled";
      if (next[at] != (run > 0 ? sampled_[i][run - 1] : t.empty() ? 0 : t.back())) return "next_token_ids";
      if (!std::equal(t.begin(), t.end(), tokens_[row])) return "token_ids";
      if (advance && lengths_.data()[row] != length_of(t)) return "num_tokens";
      lengths_.data()[row] = static_cast<int32_t>(length_of(t));
      const auto begin = drafts.begin() + i * look_.k;
      const Draft got{{begin, begin + look_.k}, num_draft[at], match_len[at]};
      event_counts_["drafts"] += got.count > 0;
      if (corrupt_) {
        if (!within_row(got, t)) return "a draft with tokens that are not in the row";
      } else if (run > 0 && ladder_.enabled) {
        if (const char* error = compare_ladder(i, got, t)) return error;
      } else if (!(got == (run > 0 ? expected_draft(t, look_) : no_draft(look_.k)))) {
        return "a draft that differs from the scan's";
      }
    }
    return nullptr;
  }

  const char* compare_ladder(int64_t i, const Draft& got, const Tokens& t) {
    const int32_t* const state = state_of(slot_indices_.data()[i]);
    const bool scanned = state[index::kSlotDisabled] != 0 || state[index::kSlotLength] < length_of(t);
    std::vector<uint8_t> paid, other_paid;
    const auto expected = [&](bool knows_outcomes, std::vector<uint8_t>* costs) {
      return expected_ladder_draft(t, look_, static_cast<const uint8_t*>(ladder_.costs), ladder_.cost_limit,
                                   knows_outcomes, costs);
    };
    const Draft want = expected(true, &paid);
    if (!(got == want))
      return scanned ? "a scanned row's draft that differs from the ladder's"
                     : "a draft that differs from the ladder's";
    paid.resize(static_cast<size_t>(k_), kNoCost);
    if (costs_to_.data != nullptr && !std::equal(paid.begin(), paid.end(), draft_costs_[i])) return "draft_costs";
    event_counts_["drafts of a ladder"] += want.count > 0;
    if (ladder_.costs == nullptr) return nullptr;
    event_counts_["drafts of scanned rows, by cost"] += scanned && want.count > 0;
    event_counts_["drafts that other outcomes would change"] += !(want == expected(false, &other_paid));
    event_counts_["drafts ended by their cost"] +=
        want.count < draft_after(t, expected_candidate(t), look_, [](int64_t, int64_t) { return true; }).count;
    return nullptr;
  }

  bool within_row(const Draft& got, const Tokens& t) const {
    if (got.count < 0 || got.count > look_.k || got.match_len < 0 || got.match_len > look_.max_n) return false;
    for (int64_t j = 0; j < look_.k; ++j) {
      const int32_t token = got.tokens[static_cast<size_t>(j)];
      if (j < got.count ? std::find(t.begin(), t.end(), token) == t.end() : token != -1) return false;
    }
    return true;
  }

  // Checks the whole structure after every slot has caught up with its row. Skips rows that would take seconds.
  const char* check() {
    append();
    int64_t where = 0;
    if (ngram_npu_cpu_ngram_index_check(index_.data(), words_, &where) != 0) return "the index is unsound";
    for (int64_t r = 0; r < rows_; ++r) {
      if (lengths_.data()[r] > kCheckedTokens) continue;
      if (ngram_npu_cpu_ngram_index_check_row(index_.data(), words_, slots_[static_cast<size_t>(r)], tokens_[r],
                                              lengths_.data()[r]) != 0) {
        return "a slot does not match its row";
      }
    }
    return nullptr;
  }

  static constexpr int64_t kCheckedTokens = 400;

  Choices& c_;
  const bool corrupt_;
  const int64_t rows_, capacity_, width_, alphabet_, pages_, k_, words_;
  GuardedRows<int32_t> tokens_, sampled_;
  Guarded<int32_t> lengths_, index_;
  Guarded<int64_t> row_indices_, slot_indices_;
  Guarded<uint8_t> costs_;
  GuardedRows<uint8_t> draft_costs_;
  std::vector<int64_t> slots_;
  LookupOptions look_{};
  DraftCosts costs_to_{};
  LadderOptions ladder_{};
  std::vector<int32_t> depths_;  // of the slots' directories, when last observed
  int32_t pages_in_use_ = 0;
  int64_t lowest_ = 0;  // of the tokens that are written
  EventCounts event_counts_ = {
      {"drafts", 0},
      {"page splits", 0},
      {"directory doublings", 0},
      {"directories on pages", 0},
      {"page releases", 0},
      {"slots disabled", 0},
      {"slots rebuilt for other tokens", 0},
      {"drafts of a ladder", 0},
      {"drafts that other outcomes would change", 0},
      {"drafts ended by their cost", 0},
      {"drafts of scanned rows, by cost", 0},
      {"outcomes on several pages", 0},
  };
};

}  // namespace ngram_npu::test
