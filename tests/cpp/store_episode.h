// An episode of events of requests that share a store, which is between guard pages. Scopes have different tokens, so
// that a draft's tokens identify its scope. The fuzz target also uses this file, so the file does not use gtest.
#pragma once

#include <algorithm>
#include <vector>

#include "choices.h"
#include "entry_points.h"
#include "guard_pages.h"

namespace ngram_npu::test {

// Functions that return text return an error, or null if there is none.
class StoreEpisode {
 public:
  // corrupt: overwrites words of the store between events. Drafts then need only stay within their tensor.
  StoreEpisode(Choices& choices, Flush flush, bool corrupt)
      : choices_(choices),
        corrupt_(corrupt),
        num_slots_(choices_.between(1, smaller<int64_t>(3, store::kMaxSlots))),
        num_blocks_(smaller(num_slots_ * store::kMinBlocksPerSlot + choices_.below(5), store::kMaxBlocks)),
        line_bits_(choices_.between(1, 6)),
        k_(choices_.between(0, 6)),
        num_words_(count_store_words(num_slots_, num_blocks_, line_bits_)),
        store_(num_words_, flush),
        tokens_(num_slots_, kCapacity, flush),
        lengths_(num_slots_, flush),
        num_sampled_(num_slots_, flush),
        drafts_(num_slots_, k_, flush),
        num_draft_tokens_(num_slots_, flush),
        match_lengths_(num_slots_, flush),
        draft_costs_(num_slots_, k_, flush),
        costs_(kCostRows * store::kStoreCostColumns, flush),
        scopes_(static_cast<size_t>(num_slots_)) {
    std::fill_n(store_.data(), num_words_, 0);
    ngram_npu_cpu_ngram_store_init(store_.data(), num_words_, num_slots_, num_blocks_, line_bits_,
                                   static_cast<uint32_t>(choices_.below(2)));
    if (choices_.one_in(2))  // The store's serial numbers will run out soon.
      store_.data()[store::kHeaderNextSerial] = static_cast<int32_t>(store::kEndOfSerials - choices_.below(4));
    std::fill_n(lengths_.data(), num_slots_, 0);
    for (int64_t i = 0; i < kCostRows * store::kStoreCostColumns; ++i)
      costs_.data()[i] = static_cast<uint8_t>(draw_number() % 40);
  }

  const char* run() {
    while (choices_.has_next_event()) {
      if (const char* error = run_event()) return error;
    }
    const bool is_intact = store_.is_intact() && tokens_.is_intact() && drafts_.is_intact() &&
                           draft_costs_.is_intact() && num_draft_tokens_.is_intact();
    if (!is_intact) return "memory outside a tensor was written";
    if (corrupt_) return nullptr;
    int64_t location = 0;
    return kStoreFaultTexts[ngram_npu_cpu_ngram_store_check(store_.data(), num_words_, &location)][0] == 0
               ? nullptr
               : "the store fails its integrity check";
  }

  const EventCounts& event_counts() const { return event_counts_; }

 private:
  static constexpr int64_t kCapacity = 700, kScopes = 3, kTokensPerScope = 4;

  // Returns a random number without using a choice, because a fuzzer has few bytes.
  uint32_t draw_number() {
    return static_cast<uint32_t>((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 33);
  }

  void append_tokens(int64_t row, int64_t count) {
    int32_t& length = lengths_.data()[row];
    for (; count > 0; --count) {
      tokens_[row][length++] =
          static_cast<int32_t>(scopes_[static_cast<size_t>(row)] + kScopes * (draw_number() % kTokensPerScope));
    }
  }

  const char* run_event() {
    if (corrupt_ && choices_.one_in(4)) {
      for (int64_t num_changes = choices_.between(1, 30); num_changes-- > 0;) {
        const int64_t word = choices_.one_in(2) ? choices_.between(store::kHeaderLock + 1, num_words_ - 1)
                                                : int64_t{store::kHeaderNextSerial};
        store_.data()[word] = static_cast<int32_t>(choices_.below(int64_t{1} << 32));
      }
    }
    switch (choices_.below(12)) {
      case 0: return finish_request();
      case 1: return choices_.one_in(4) ? clear_scope() : nullptr;
      case 2: return choices_.one_in(4) ? mark_update() : nullptr;
      default: return run_step();
    }
  }

  const char* finish_request() {
    const int64_t slot = choices_.between(-1, num_slots_);
    const NgramStoreFinishParams params{{store_.data(), num_words_}, {&slot, 8}, 1};
    ngram_npu_cpu_ngram_store_finish_(&params, nullptr);
    ++event_counts_["requests finished"];
    if (slot >= 0 && slot < num_slots_) lengths_.data()[slot] = 0;
    return nullptr;
  }

  const char* clear_scope() {
    const int64_t scope = choices_.below(kScopes);
    ngram_npu_cpu_ngram_store_clear(store_.data(), num_words_, &scope);
    ++event_counts_["scopes cleared"];
    return nullptr;
  }

  // Sometimes drops the text before the update or before the update before it.
  const char* mark_update() {
    const int64_t mark = ngram_npu_cpu_ngram_store_mark_update(store_.data(), num_words_);
    int64_t num_kept[3], usage[3];
    ngram_npu_cpu_ngram_store_usage(store_.data(), num_words_, num_kept);
    const bool drops_all = choices_.one_in(2);
    if (drops_all || update_mark_ != 0)
      ngram_npu_cpu_ngram_store_drop(store_.data(), num_words_, drops_all ? mark : update_mark_);
    ngram_npu_cpu_ngram_store_usage(store_.data(), num_words_, usage);
    event_counts_["texts dropped"] += usage[0] < num_kept[0];
    update_mark_ = mark;
    if (corrupt_) return nullptr;
    if (usage[2] != 0) return "a slot is open after an update";
    return drops_all && usage[0] != 0 ? "text from before the update was kept" : nullptr;
  }

  // Appends tokens of the row's scope to the row. Before that, sometimes and if the row is nearly full, another request
  // takes the row and its slot.
  void grow_row(int64_t row) {
    int32_t& length = lengths_.data()[row];
    auto& scope = scopes_[static_cast<size_t>(row)];
    if (length == 0 || length > kCapacity - 250 || choices_.one_in(20)) {
      scope = choices_.below(kScopes);
      length = 0;
      append_tokens(row, choices_.between(0, 20));
    }
    constexpr int64_t kCounts[] = {0, 1, 2, 5, 70, 250};
    const int64_t count = kCounts[choices_.below(choices_.one_in(4) ? 6 : 4)];
    append_tokens(row, count);
    num_sampled_.data()[row] = static_cast<int32_t>(count);
  }

  const char* run_step() {
    for (int64_t row = 0; row < num_slots_; ++row) grow_row(row);
    std::fill_n(num_draft_tokens_.data(), num_slots_, 0);
    std::fill_n(match_lengths_.data(), num_slots_, 0);
    NgramStoreStepParams params{};
    params.token_ids = tokens_.view<const int32_t>();
    params.num_tokens = lengths_.data();
    params.num_sampled = num_sampled_.data();
    params.scopes = {scopes_.data(), 8};
    params.batch = num_slots_;
    params.store = {store_.data(), num_words_};
    params.draft_token_ids = drafts_.view();
    params.num_draft_tokens = num_draft_tokens_.data();
    params.match_len = match_lengths_.data();
    params.draft_costs = draft_costs_.view();
    params.max_len = kCapacity;
    params.costs = costs_.data();
    params.cost_limit = choices_.between(0, 90);
    const auto* header = reinterpret_cast<const uint32_t*>(store_.data());
    const uint32_t num_evicted = header[store::kStatEvicted], num_lost = header[store::kStatLostBlocks],
                   num_renumberings = header[store::kStatRenumberings];
    ngram_npu_cpu_ngram_store_step_(&params, nullptr);
    if (corrupt_) return nullptr;
    event_counts_["entries evicted"] += header[store::kStatEvicted] - num_evicted;
    event_counts_["blocks lost"] += header[store::kStatLostBlocks] - num_lost;
    event_counts_["renumberings"] += header[store::kStatRenumberings] - num_renumberings;
    for (int64_t row = 0; row < num_slots_; ++row) {
      for (int64_t j = 0; j < num_draft_tokens_.data()[row]; ++j) {
        if (drafts_[row][j] % kScopes != scopes_[static_cast<size_t>(row)]) return "text of another scope was drafted";
        ++event_counts_["drafts"];
      }
    }
    return nullptr;
  }

  Choices& choices_;
  const bool corrupt_;
  const int64_t num_slots_, num_blocks_, line_bits_, k_, num_words_;
  Guarded<int32_t> store_;
  GuardedRows<int32_t> tokens_;
  Guarded<int32_t> lengths_, num_sampled_;
  GuardedRows<int32_t> drafts_;
  Guarded<int32_t> num_draft_tokens_, match_lengths_;
  GuardedRows<uint8_t> draft_costs_;
  Guarded<uint8_t> costs_;
  std::vector<int64_t> scopes_;
  int64_t update_mark_ = 0;
  uint64_t state_ = 1;
  EventCounts event_counts_ = {{"drafts", 0},       {"entries evicted", 0},   {"blocks lost", 0},
                               {"renumberings", 0}, {"requests finished", 0}, {"scopes cleared", 0},
                               {"texts dropped", 0}};
};

}  // namespace ngram_npu::test
