// A store between guard pages and the requests that share it, driven by random choices or a fuzzer's. Scopes have
// different tokens, so that a draft shows the scope of its text. No gtest here: the fuzz target has none.
#pragma once

#include <algorithm>
#include <vector>

#include "choices.h"
#include "entry_points.h"
#include "guard_pages.h"

namespace ngram_npu::test {

class StoreEpisode {
 public:
  // corrupt: overwrites the store's words between events; drafts then only have to stay within their tensor.
  StoreEpisode(Choices& choices, Flush flush, bool corrupt)
      : c_(choices),
        corrupt_(corrupt),
        slots_(c_.from(1, smaller<int64_t>(3, store::kMaxSlots))),
        blocks_(smaller(slots_ * store::kMinBlocksPerSlot + c_.below(5), store::kMaxBlocks)),
        bits_(c_.from(1, 6)),
        k_(c_.from(0, 6)),
        words_(store_words(slots_, blocks_, bits_)),
        store_(words_, flush),
        tokens_(slots_, kCapacity, flush),
        lengths_(slots_, flush),
        sampled_(slots_, flush),
        drafts_(slots_, k_, flush),
        counts_(slots_, flush),
        match_(slots_, flush),
        paid_(slots_, k_, flush),
        costs_(kCostRows * store::kStoreCostColumns, flush),
        owner_(static_cast<size_t>(slots_)) {
    std::fill_n(store_.data(), words_, 0);
    ngram_npu_cpu_ngram_store_init(store_.data(), words_, slots_, blocks_, bits_, static_cast<uint32_t>(c_.below(2)));
    if (c_.one_in(2))  // an old store: its serial numbers run out soon
      store_.data()[store::kHeaderNextSerial] = static_cast<int32_t>(store::kEndOfSerials - c_.below(4));
    std::fill_n(lengths_.data(), slots_, 0);
    for (int64_t i = 0; i < kCostRows * store::kStoreCostColumns; ++i)
      costs_.data()[i] = static_cast<uint8_t>(next() % 40);
  }

  const char* run() {
    while (c_.more()) {
      if (const char* error = event()) return error;
    }
    const bool intact =
        store_.is_intact() && tokens_.is_intact() && drafts_.is_intact() && paid_.is_intact() && counts_.is_intact();
    if (!intact) return "memory outside a tensor was written";
    if (corrupt_) return nullptr;
    int64_t where = 0;
    return kStoreFaultTexts[ngram_npu_cpu_ngram_store_check(store_.data(), words_, &where)][0] == 0 ? nullptr
                                                                                                    : "integrity";
  }

  const EventCounts& event_counts() const { return event_counts_; }

 private:
  static constexpr int64_t kCapacity = 700, kScopes = 3, kAlphabet = 4;

  // Random numbers that use no choice, since a fuzzer has few bytes.
  uint32_t next() {
    return static_cast<uint32_t>((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 33);
  }

  void append_tokens(int64_t row, int64_t count) {
    int32_t& length = lengths_.data()[row];
    for (; count > 0; --count) {
      tokens_[row][length++] = static_cast<int32_t>(owner_[static_cast<size_t>(row)] + kScopes * (next() % kAlphabet));
    }
  }

  const char* event() {
    if (corrupt_ && c_.one_in(4)) {
      for (int64_t left = c_.from(1, 30); left-- > 0;) {
        const int64_t at =
            c_.one_in(2) ? c_.from(store::kHeaderLock + 1, words_ - 1) : int64_t{store::kHeaderNextSerial};
        store_.data()[at] = static_cast<int32_t>(c_.below(int64_t{1} << 32));
      }
    }
    switch (c_.below(12)) {
      case 0: return finish();
      case 1: return c_.one_in(4) ? clear() : nullptr;
      default: return step();
    }
  }

  const char* finish() {
    const int64_t slot = c_.from(-1, slots_);
    const NgramStoreFinishParams params{{store_.data(), words_}, {&slot, 8}, 1};
    ngram_npu_cpu_ngram_store_finish_(&params, nullptr);
    ++event_counts_["requests finished"];
    if (slot >= 0 && slot < slots_) lengths_.data()[slot] = 0;
    return nullptr;
  }

  const char* clear() {
    const int64_t scope = c_.below(kScopes);
    ngram_npu_cpu_ngram_store_clear(store_.data(), words_, &scope);
    ++event_counts_["scopes cleared"];
    return nullptr;
  }

  // A row grows by tokens of its scope, or another request takes its slot.
  void grow(int64_t row) {
    int32_t& length = lengths_.data()[row];
    auto& owner = owner_[static_cast<size_t>(row)];
    if (length == 0 || length > kCapacity - 250 || c_.one_in(20)) {
      owner = c_.below(kScopes);
      length = 0;
      append_tokens(row, c_.from(0, 20));
    }
    constexpr int64_t kCounts[] = {0, 1, 2, 5, 70, 250};
    const int64_t count = kCounts[c_.below(c_.one_in(4) ? 6 : 4)];
    append_tokens(row, count);
    sampled_.data()[row] = static_cast<int32_t>(count);
  }

  const char* step() {
    for (int64_t row = 0; row < slots_; ++row) grow(row);
    std::fill_n(counts_.data(), slots_, 0);
    std::fill_n(match_.data(), slots_, 0);
    NgramStoreStepParams p{};
    p.token_ids = tokens_.view<const int32_t>();
    p.num_tokens = lengths_.data();
    p.num_sampled = sampled_.data();
    p.scopes = {owner_.data(), 8};
    p.batch = slots_;
    p.store = {store_.data(), words_};
    p.draft_token_ids = drafts_.view();
    p.num_draft_tokens = counts_.data();
    p.match_len = match_.data();
    p.draft_costs = paid_.view();
    p.max_len = kCapacity;
    p.costs = costs_.data();
    p.cost_limit = c_.from(0, 90);
    const auto* header = reinterpret_cast<const uint32_t*>(store_.data());
    const uint32_t evicted = header[store::kStatEvicted], lost = header[store::kStatLostBlocks],
                   renumberings = header[store::kStatRenumberings];
    ngram_npu_cpu_ngram_store_step_(&p, nullptr);
    if (corrupt_) return nullptr;
    event_counts_["entries evicted"] += header[store::kStatEvicted] - evicted;
    event_counts_["blocks lost"] += header[store::kStatLostBlocks] - lost;
    event_counts_["renumberings"] += header[store::kStatRenumberings] - renumberings;
    for (int64_t row = 0; row < slots_; ++row) {
      for (int64_t j = 0; j < counts_.data()[row]; ++j) {
        if (drafts_[row][j] % kScopes != owner_[static_cast<size_t>(row)]) return "text of another scope was drafted";
        ++event_counts_["drafts"];
      }
    }
    return nullptr;
  }

  Choices& c_;
  const bool corrupt_;
  const int64_t slots_, blocks_, bits_, k_, words_;
  Guarded<int32_t> store_;
  GuardedRows<int32_t> tokens_;
  Guarded<int32_t> lengths_, sampled_;
  GuardedRows<int32_t> drafts_;
  Guarded<int32_t> counts_, match_;
  GuardedRows<uint8_t> paid_;
  Guarded<uint8_t> costs_;
  std::vector<int64_t> owner_;
  uint64_t state_ = 1;
  EventCounts event_counts_ = {{"drafts", 0},       {"entries evicted", 0},   {"blocks lost", 0},
                               {"renumberings", 0}, {"requests finished", 0}, {"scopes cleared", 0}};
};

}  // namespace ngram_npu::test
