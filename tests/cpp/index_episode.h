// An episode of events that change rows and their index, which are between guard pages. Compares the drafts with the
// definitions (oracle.h). The fuzz target also uses this file, so the file does not use gtest.
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

// One index and its rows. Some rows are long enough to fill several pages. Functions that return text return an error,
// or null if there is none.
class IndexEpisode {
 public:
  // corrupt: overwrites words of the index between events. Drafts then need only contain tokens of their row.
  IndexEpisode(Choices& choices, Flush flush, bool corrupt)
      : choices_(choices),
        corrupt_(corrupt),
        num_rows_(choices_.between(1, 4)),
        capacity_(choices_.one_in(3) ? 8 * index::kPageWords : choices_.between(2, 90)),
        width_(choices_.between(1, 4)),
        vocab_size_(choices_.between(1, choices_.one_in(2) ? 4 : 250)),
        num_pages_(choices_.one_in(3) ? choices_.between(1, 12) : 64),
        k_(choices_.between(1, 5)),
        num_words_(ngram_npu_cpu_ngram_index_words(num_rows_, num_pages_)),
        tokens_(num_rows_, capacity_, flush),
        sampled_(num_rows_, width_, flush),
        lengths_(num_rows_, flush),
        index_(num_words_, flush),
        row_indices_(num_rows_, flush),
        slot_indices_(num_rows_, flush),
        costs_(kCostRows * kRowCostColumns, flush),
        draft_cost_rows_(num_rows_, k_, flush),
        slots_(static_cast<size_t>(num_rows_)),
        depths_(static_cast<size_t>(num_rows_)) {
    lookup_.min_n = choices_.between(1, 4);
    lookup_.max_n = lookup_.min_n + choices_.below(index::kMaxLevels);
    lookup_.k = k_;
    lookup_.max_len = choices_.one_in(4) ? choices_.between(0, capacity_) : int64_t{1} << 40;
    lookup_.match_policy = static_cast<int32_t>(choices_.below(2));
    lookup_.overlap = choices_.one_in(2);
    if (choices_.one_in(3)) choose_ladder();
    std::fill_n(index_.data(), num_words_, 0);
    std::fill_n(lengths_.data(), num_rows_, 0);
    for (int64_t r = 0; r < num_rows_; ++r) {
      slots_[static_cast<size_t>(r)] = r;
      std::fill_n(tokens_[r], capacity_, 0);
    }
    ngram_npu_cpu_ngram_index_init(index_.data(), num_words_, num_rows_);
  }

  const char* run() {
    while (choices_.has_next_event()) {
      if (const char* error = run_event()) return error;
    }
    if (!tokens_.is_intact() || !lengths_.is_intact() || !index_.is_intact() || !draft_cost_rows_.is_intact()) {
      return "memory outside a tensor was written";
    }
    return corrupt_ ? nullptr : check_index();
  }

  const EventCounts& event_counts() const { return event_counts_; }

 private:
  void choose_ladder() {
    ladder_.enabled = true;
    lookup_.min_n = 1;
    lookup_.max_n = kLadderMaxN;
    lookup_.match_policy = kLatest;
    if (choices_.one_in(4)) return;
    ladder_.costs = costs_.data();
    ladder_.cost_limit = choices_.below(150);
    const auto seed = choices_.below(256);
    for (int64_t i = 0; i < costs_.size(); ++i) costs_.data()[i] = static_cast<uint8_t>((i + 1) * (2 * seed + 1) % 61);
    costs_.forbid_writes();
    if (choices_.one_in(4)) return;
    draft_costs_view_ = {draft_cost_rows_[0], draft_cost_rows_.view().stride};
  }

  const char* run_event() {
    const int64_t row = choices_.below(num_rows_);
    switch (choices_.below(9)) {
      case 0: write_tokens(row); break;
      case 1:
        write_tokens(row);
        append_to_index();
        break;
      case 2:  // Another request gets the row.
        lengths_.data()[row] = 0;
        reset_slot(slots_[static_cast<size_t>(row)]);
        write_tokens(row);
        break;
      case 3:  // The row loses its last tokens.
        lengths_.data()[row] = static_cast<int32_t>(choices_.between(0, lengths_.data()[row]));
        append_to_index();
        break;
      case 4:  // Another request gets the row and the slot, which is not reset. No earlier row had its tokens.
        lengths_.data()[row] = 0;
        first_token_ += 1000;
        write_tokens(row);
        break;
      case 5: {  // Two requests exchange their rows, but keep their slots.
        const int64_t other_row = choices_.below(num_rows_);
        std::swap_ranges(tokens_[row], tokens_[row] + capacity_, tokens_[other_row]);
        std::swap(lengths_.data()[row], lengths_.data()[other_row]);
        std::swap(slots_[static_cast<size_t>(row)], slots_[static_cast<size_t>(other_row)]);
        break;
      }
      default: break;
    }
    if (corrupt_) corrupt_words();
    for (int64_t i = choices_.between(1, 4); i > 0; --i) {
      if (const char* error = run_step()) return error;
    }
    return nullptr;
  }

  // Appends tokens to a row: random tokens, or a copy of earlier tokens of the row. A long run of tokens
  // (`is_long`) uses few choices.
  void write_tokens(int64_t row) {
    int32_t& length = lengths_.data()[row];
    const bool is_copy = length > 4 && choices_.one_in(2);
    const int64_t source = is_copy ? choices_.below(length) : 0;
    const bool is_long = choices_.one_in(2);
    const int64_t size = std::min<int64_t>(choices_.below(is_long ? capacity_ : 40), capacity_ - length);
    uint64_t state = is_long ? static_cast<uint64_t>(choices_.below(65536)) : 0;
    for (int64_t i = 0; i < size; ++i) {
      state = state * 0x5851f42d4c957f2du + 0x14057b7ef767814fu;
      const auto random_token = static_cast<int64_t>(state >> 33) % vocab_size_;
      tokens_[row][length + i] =
          is_copy ? tokens_[row][source + i]
                  : static_cast<int32_t>(first_token_ + (is_long ? random_token : choices_.below(vocab_size_)));
    }
    length += static_cast<int32_t>(size);
  }

  void append_to_index() {
    for (int64_t r = 0; r < num_rows_; ++r) slot_indices_.data()[r] = slots_[static_cast<size_t>(r)];
    const NgramIndexAppendParams params{tokens_.view<const int32_t>(),
                                        lengths_.data(),
                                        {},
                                        num_rows_,
                                        lookup_.min_n,
                                        lookup_.max_n,
                                        lookup_.match_policy,
                                        ladder_.enabled,
                                        ladder_.costs != nullptr,
                                        {index_.data(), num_words_, {slot_indices_.data(), 8}},
                                        nullptr};
    ngram_npu_cpu_ngram_index_append_(&params, nullptr);
    count_effects();
  }

  void reset_slot(int64_t slot) {
    slot_indices_.data()[0] = slot;
    const NgramIndexResetParams params{{index_.data(), num_words_, {slot_indices_.data(), 8}}, 1};
    ngram_npu_cpu_ngram_index_reset_(&params, nullptr);
    count_effects();
  }

  // Counts the effects of the last call. Does not see pages that the call both allocated and freed.
  void count_effects() {
    if (corrupt_) return;
    const int32_t* words = index_.data();
    event_counts_["page splits"] = words[index::kStatSplits];
    event_counts_["slots rebuilt for other_row tokens"] = words[index::kStatRebuildTokens];
    event_counts_["slots disabled"] = words[index::kStatDisabled];
    event_counts_["page releases"] += std::max(0, pages_in_use_ - words[index::kHeaderPagesInUse]);
    pages_in_use_ = words[index::kHeaderPagesInUse];
    for (size_t slot = 0; slot < depths_.size(); ++slot) {
      const int32_t* const state = state_of(static_cast<int64_t>(slot));
      const int32_t depth = state[index::kSlotDepth];
      event_counts_["outcomes on several pages"] += state[index::kSlotOutcomePages] > 1;
      constexpr auto kMaxDepthInSlot = static_cast<int32_t>(index::kRootDepth);
      event_counts_["directory doublings"] += std::max(0, depth - depths_[slot]);
      event_counts_["directories on pages"] += depth > kMaxDepthInSlot && depths_[slot] <= kMaxDepthInSlot;
      depths_[slot] = depth;
    }
  }

  const int32_t* state_of(int64_t slot) const { return index_.data() + index::kHeaderWords + slot * index::kSlotWords; }

  void corrupt_words() {
    const int64_t pages_begin = num_words_ - num_pages_ * index::kPageWords;
    const int64_t target = choices_.below(6);  // 0: nothing, 1: the header, 2: the slots and page owners, 3 to 5: pages
    if (target == 0) return;
    const int64_t begin = target == 1 ? 0 : target == 2 ? index::kHeaderWords : pages_begin;
    const int64_t end = target == 1 ? 8 : target == 2 ? pages_begin : num_words_;
    for (int64_t num_changes = target < 3 ? choices_.between(1, 6) : choices_.between(1, 60); num_changes > 0;
         --num_changes) {
      const int64_t position = begin + (choices_.below(256) * 257 + choices_.below(256)) % (end - begin);
      if (target == 5) {
        index_.data()[position] = index_.data()[position] ^ (1 << choices_.below(31));
      } else {
        index_.data()[position] =
            static_cast<int32_t>(choices_.one_in(2) ? choices_.below(600) : choices_.below(int64_t{1} << 32));
      }
    }
  }

  const char* run_step() {
    const int64_t batch = choices_.between(1, num_rows_);
    const int64_t first_row = choices_.below(num_rows_);
    const bool advance = choices_.one_in(2);
    std::vector<Tokens> rows;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t row = (first_row + i) % num_rows_;
      row_indices_.data()[i] = row;
      slot_indices_.data()[i] = slots_[static_cast<size_t>(row)];
      for (int64_t j = 0; j < width_; ++j) sampled_[i][j] = static_cast<int32_t>(choices_.between(-1, vocab_size_ - 1));
      rows.emplace_back(tokens_[row], tokens_[row] + lengths_.data()[row]);
    }
    const auto size = static_cast<size_t>(batch);
    Tokens next(size), num_sampled(size), drafts(size * static_cast<size_t>(lookup_.k)), num_draft(size),
        match_len(size);
    const int64_t catch_up_tokens = choices_.one_in(3) ? choices_.below(50) : -1;
    const auto set_parameters = [&](auto& params, auto& propose) {
      params.index = {index_.data(), num_words_, {slot_indices_.data(), 8}};
      params.catch_up_tokens = catch_up_tokens;
      params.ladder = ladder_;
      propose.num_tokens = lengths_.data();
      propose.num_sampled = num_sampled.data();
      propose.row_indices = {row_indices_.data(), 8};
      propose.batch = batch;
      propose.lookup = lookup_;
      propose.draft_token_ids = {drafts.data(), lookup_.k, 4};
      propose.draft_costs = draft_costs_view_;
      propose.num_draft_tokens = num_draft.data();
      propose.match_len = match_len.data();
    };
    if (choices_.one_in(4)) {  // the caller appends the sampled tokens itself
      for (int64_t i = 0; i < batch; ++i) {
        const auto batch_position = static_cast<size_t>(i);
        const int64_t row = row_indices_.data()[i];
        int32_t& length = lengths_.data()[row];
        if (length > 0) next[batch_position] = tokens_[row][length - 1];
        for (; num_sampled[batch_position] < width_ && sampled_[i][num_sampled[batch_position]] >= 0;
             ++num_sampled[batch_position]) {
          next[batch_position] = sampled_[i][num_sampled[batch_position]];
          if (length < capacity_) tokens_[row][length++] = next[batch_position];
        }
      }
      NgramIndexProposeParams params{};
      params.propose.token_ids = tokens_.view<const int32_t>();
      set_parameters(params, params.propose);
      ngram_npu_cpu_ngram_index_propose_(&params, nullptr);
    } else {
      NgramIndexStepParams params{};
      params.step.token_ids = tokens_.view();
      params.step.sampled_token_ids = sampled_.view<const int32_t>();
      params.step.advance = advance;
      params.step.vocab_size = 1000;
      params.step.next_token_ids = next.data();
      set_parameters(params, params.step);
      ngram_npu_cpu_ngram_index_step_(&params, nullptr);
    }
    count_effects();
    for (int64_t i = 0; i < batch; ++i) {
      const auto batch_position = static_cast<size_t>(i);
      const int64_t row = row_indices_.data()[i];
      Tokens& row_tokens = rows[batch_position];
      int32_t num_new = 0;
      while (num_new < width_ && sampled_[i][num_new] >= 0) ++num_new;
      for (int32_t j = 0; j < num_new && length_of(row_tokens) < capacity_; ++j) row_tokens.push_back(sampled_[i][j]);
      if (num_sampled[batch_position] != num_new) return "num_sampled: expected the number of sampled tokens";
      if (next[batch_position] != (num_new > 0 ? sampled_[i][num_new - 1] : row_tokens.empty() ? 0 : row_tokens.back()))
        return "next_token_ids: expected the row's last token";
      if (!std::equal(row_tokens.begin(), row_tokens.end(), tokens_[row]))
        return "token_ids: expected the row and its sampled tokens";
      if (advance && lengths_.data()[row] != length_of(row_tokens))
        return "num_tokens: expected the number of tokens in the row";
      lengths_.data()[row] = static_cast<int32_t>(length_of(row_tokens));
      const auto begin = drafts.begin() + i * lookup_.k;
      const Draft draft{{begin, begin + lookup_.k}, num_draft[batch_position], match_len[batch_position]};
      event_counts_["drafts"] += draft.count > 0;
      if (corrupt_) {
        if (!is_within_row(draft, row_tokens)) return "a draft with tokens that are not in the row";
      } else if (num_new > 0 && ladder_.enabled) {
        if (const char* error = compare_ladder(i, draft, row_tokens)) return error;
      } else if (!(draft ==
                   (num_new > 0 ? compute_expected_draft(row_tokens, lookup_) : make_empty_draft(lookup_.k)))) {
        return "a draft that differs from the scan's";
      }
    }
    return nullptr;
  }

  const char* compare_ladder(int64_t i, const Draft& draft, const Tokens& row_tokens) {
    const int32_t* const state = state_of(slot_indices_.data()[i]);
    const bool is_scanned = state[index::kSlotDisabled] != 0 || state[index::kSlotLength] < length_of(row_tokens);
    std::vector<uint8_t> token_costs, costs_without_outcomes;
    const auto compute_expected = [&](bool knows_outcomes, std::vector<uint8_t>* costs) {
      return compute_expected_ladder_draft(row_tokens, lookup_, static_cast<const uint8_t*>(ladder_.costs),
                                           ladder_.cost_limit, knows_outcomes, costs);
    };
    const Draft expected_draft = compute_expected(true, &token_costs);
    if (!(draft == expected_draft))
      return is_scanned ? "a scanned row's draft that differs from the ladder's"
                        : "a draft that differs from the ladder's";
    token_costs.resize(static_cast<size_t>(k_), kNoCost);
    if (draft_costs_view_.data != nullptr && !std::equal(token_costs.begin(), token_costs.end(), draft_cost_rows_[i]))
      return "draft_costs: expected the cost of each draft token";
    event_counts_["drafts of a ladder"] += expected_draft.count > 0;
    if (ladder_.costs == nullptr) return nullptr;
    event_counts_["drafts of scanned rows, by cost"] += is_scanned && expected_draft.count > 0;
    event_counts_["drafts that would differ without outcomes"] +=
        !(expected_draft == compute_expected(false, &costs_without_outcomes));
    const auto accept_all = [](int64_t, int64_t) { return true; };
    const Draft uncut_draft = copy_draft_after(row_tokens, find_expected_candidate(row_tokens), lookup_, accept_all);
    event_counts_["drafts ended by their cost"] += expected_draft.count < uncut_draft.count;
    return nullptr;
  }

  bool is_within_row(const Draft& draft, const Tokens& row_tokens) const {
    if (draft.count < 0 || draft.count > lookup_.k || draft.match_len < 0 || draft.match_len > lookup_.max_n)
      return false;
    for (int64_t j = 0; j < lookup_.k; ++j) {
      const int32_t token = draft.tokens[static_cast<size_t>(j)];
      if (j < draft.count ? std::find(row_tokens.begin(), row_tokens.end(), token) == row_tokens.end() : token != -1)
        return false;
    }
    return true;
  }

  // Appends all rows to the index, and checks the whole index. Skips rows with so many tokens that the check would take
  // seconds.
  const char* check_index() {
    append_to_index();
    int64_t location = 0;
    if (ngram_npu_cpu_ngram_index_check(index_.data(), num_words_, &location) != 0)
      return "the index fails its integrity check";
    for (int64_t r = 0; r < num_rows_; ++r) {
      if (lengths_.data()[r] > kMaxCheckedTokens) continue;
      if (ngram_npu_cpu_ngram_index_check_row(index_.data(), num_words_, slots_[static_cast<size_t>(r)], tokens_[r],
                                              lengths_.data()[r]) != 0) {
        return "a slot does not match its row";
      }
    }
    return nullptr;
  }

  static constexpr int64_t kMaxCheckedTokens = 400;

  Choices& choices_;
  const bool corrupt_;
  const int64_t num_rows_, capacity_, width_, vocab_size_, num_pages_, k_, num_words_;
  GuardedRows<int32_t> tokens_, sampled_;
  Guarded<int32_t> lengths_, index_;
  Guarded<int64_t> row_indices_, slot_indices_;
  Guarded<uint8_t> costs_;
  GuardedRows<uint8_t> draft_cost_rows_;
  std::vector<int64_t> slots_;
  LookupOptions lookup_{};
  DraftCosts draft_costs_view_{};
  LadderOptions ladder_{};
  std::vector<int32_t> depths_;  // depth of each slot's directory at the last count_effects()
  int32_t pages_in_use_ = 0;     // at the last count_effects()
  int64_t first_token_ = 0;      // smallest token id that write_tokens() writes
  EventCounts event_counts_ = {
      {"drafts", 0},
      {"page splits", 0},
      {"directory doublings", 0},
      {"directories on pages", 0},
      {"page releases", 0},
      {"slots disabled", 0},
      {"slots rebuilt for other_row tokens", 0},
      {"drafts of a ladder", 0},
      {"drafts that would differ without outcomes", 0},
      {"drafts ended by their cost", 0},
      {"drafts of scanned rows, by cost", 0},
      {"outcomes on several pages", 0},
  };
};

}  // namespace ngram_npu::test
