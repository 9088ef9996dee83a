// Random steps of requests that share a store between guard pages, compared with a naive model after each call.
// All scopes have the same phrases, so text of another scope would match everywhere; the marks in between show whose
// text a draft is. No gtest here: the fuzz target has none.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "choices.h"
#include "core/store.h"
#include "guard_pages.h"
#include "store_model.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_store_append_(const ngram_npu::StoreAppendParams*, void*);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_store_propose_(const ngram_npu::StoreProposeParams*, void*);

namespace ngram_npu::test {

class StoreEpisode {
 public:
  // flush: the side next to a guard page. corrupt: overwrites words between events; calls then only stay in bounds.
  StoreEpisode(Choices& choices, Flush flush, bool corrupt)
      : choices_(choices),
        corrupt_(corrupt),
        hold_back_(choices_.one_in(2)),
        has_hostile_arguments_(choices_.one_in(2)),
        batch_(choices_.between(1, 5)),
        num_blocks_(choices_.one_in(4) ? choices_.between(2, 5) : choices_.between(6, 24)),
        columns_(int64_t{1} << (choices_.one_in(4)   ? 0
                                : choices_.one_in(3) ? choices_.between(1, 6)
                                                     : 12)),
        num_scopes_(choices_.between(1, 5)),
        k_(choices_.one_in(2) ? 6 : choices_.between(1, 64)),
        max_new_(choices_.one_in(4) ? choices_.between(1, 8) : 400),
        text_(num_blocks_, 256, flush),
        blocks_(num_blocks_, 8, flush),
        table_(StoreModel::kLevels, 2 * columns_, flush),
        slots_(batch_, 8, flush),
        allocator_(2, flush),
        tokens_(batch_, kCapacity, flush),
        lengths_(batch_, flush),
        sampled_(batch_, flush),
        drafts_(batch_, k_, flush),
        counts_(batch_, flush),
        match_(batch_, flush),
        agreement_(batch_, flush),
        rows_(static_cast<size_t>(batch_)),
        model_(num_blocks_, columns_, batch_, choices_.one_in(4) ? StoreModel::kEnd - choices_.below(16) : 1) {
    const auto zero = [](const auto& rows, int64_t count, int64_t width) {
      for (int64_t row = 0; row < count; ++row) std::fill_n(rows[row], width, 0);
    };
    zero(text_, num_blocks_, 256);
    zero(blocks_, num_blocks_, 8);
    zero(table_, StoreModel::kLevels, 2 * columns_);
    zero(slots_, batch_, 8);
    std::fill_n(allocator_.data(), 2, static_cast<int32_t>(model_.next_number()));
    for (int64_t row = 0; row < batch_; ++row) begin_request(row);
  }

  const char* run() {
    while (choices_.has_next_event()) {
      if (const char* error = run_event()) return error;
    }
    const bool intact = text_.is_intact() && blocks_.is_intact() && table_.is_intact() && slots_.is_intact() &&
                        allocator_.is_intact() && drafts_.is_intact() && counts_.is_intact() && match_.is_intact() &&
                        agreement_.is_intact();
    if (!intact) return "memory outside a tensor was written";
    event_counts_ += model_.event_counts();
    return nullptr;
  }

  const EventCounts& event_counts() const { return event_counts_; }

 private:
  using Model = StoreModel;

  enum HeadWord : int64_t { kNumber, kPrevious, kNext, kFill, kScopeLow, kScopeHigh };  // of a block
  static constexpr int64_t kCapacity = 1200;
  static constexpr int32_t kFirstMark = 1000, kFirstPrompt = 1'000'000, kGarbage = 10'000'000;
  static constexpr int32_t kHostile[] = {INT32_MIN, -1, 0, 1, INT32_MAX};
  // Some have the same low or the same high 32 bits.
  static constexpr int64_t kScopes[] = {0, 7, INT64_MIN, (int64_t{1} << 32) + 7, -2};
  static constexpr int64_t kPrivateScope = -1;

  // A row of tokens and its request. With hold_back_, a request's last step has garbage tokens, which are not stored.
  struct Row {
    int64_t scope = 0;
    int32_t mark = 0;
    bool has_ended = false;
    uint32_t phrase = 0, place = 0;          // the next token is phrase[place]
    std::vector<int32_t> copied, generated;  // `copied`: an earlier text of the scope, which the request repeats
  };

  // The requests of a step, in the order of the batch.
  struct Step {
    std::vector<int64_t> rows, slots, scopes;
    int64_t count() const { return static_cast<int64_t>(rows.size()); }
  };

  // Pseudo-random numbers that use no byte of a fuzzer's input, because it has few bytes.
  uint32_t draw_number() {
    return static_cast<uint32_t>((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 33);
  }

  template <class T, size_t size>
  T any_of(const T (&values)[size]) {
    return values[choices_.below(size)];
  }

  Row& row_at(int64_t row) { return rows_[static_cast<size_t>(row)]; }

  void append_token(int64_t row, int32_t token) { tokens_[row][lengths_.data()[row]++] = token; }

  int64_t choose_scope() { return kScopes[choices_.below(num_scopes_)]; }

  // Returns a new request that replaces `old`. Half of the requests repeat the text of an ended one of their scope.
  Row make_request(const Row& old) {
    if (!old.generated.empty()) ended_[old.scope] = old.generated;
    Row request;
    request.scope = choose_scope();
    request.mark = kFirstMark + static_cast<int32_t>(scopes_.size());
    scopes_.push_back(request.scope);
    request.phrase = draw_number() % 3;
    if (choices_.one_in(2)) request.copied = ended_[request.scope];
    return request;
  }

  void begin_request(int64_t row) {
    row_at(row) = make_request(row_at(row));
    lengths_.data()[row] = 0;
    for (int64_t left = choices_.between(1, 40); left-- > 0;) append_token(row, kFirstPrompt + row_at(row).mark);
  }

  // Phrases contain hostile values, and are longer than the longest n-gram.
  int32_t next_token(Row& row) {
    if (row.generated.size() < row.copied.size()) return row.copied[row.generated.size()];
    if (draw_number() % 12 == 0) {
      row.phrase = draw_number() % 3;
      row.place = draw_number() % 8;
      return row.mark;
    }
    const uint32_t at = row.place++;
    return (at * 7 + row.phrase) % 11 < 5 ? kHostile[(at * at + row.phrase) % 5] : static_cast<int32_t>(at % 9);
  }

  int32_t generate(Row& row) {
    row.generated.push_back(next_token(row));
    return row.generated.back();
  }

  // A block, preferably one whose predecessor or successor was reassigned or shortened.
  int64_t choose_block() {
    for (int64_t row = 0; row < num_blocks_; ++row) {
      for (int64_t word : {kPrevious, kNext}) {
        const int32_t neighbour = blocks_[row][word];
        const int32_t* const head = blocks_[std::max(neighbour, 0) % num_blocks_];
        if (neighbour > 0 && (head[kNumber] != neighbour || head[kFill] < 256) && choices_.one_in(4)) return row;
      }
    }
    return choices_.below(num_blocks_);
  }

  // Appends tokens of the block to the row: those around the block's beginning, or the last ones, after which a draft
  // continues in the next block. Marks of other scopes, which a reassigned predecessor has, are replaced.
  int64_t repeat_edge(int64_t row, int64_t block) {
    const int64_t fill = fill_of(block), previous = blocks_[block][kPrevious];
    std::vector<int32_t> tokens;
    if (previous > 0 && choices_.one_in(2)) {
      const int32_t* const text = text_[previous % num_blocks_];
      tokens.assign(text + 240, text + 256);
      tokens.insert(tokens.end(), text_[block], text_[block] + std::min(choices_.below(16), fill));
    } else {
      const int64_t end = fill - std::min(choices_.below(k_), fill);
      tokens.assign(text_[block] + std::max<int64_t>(end - 20, 0), text_[block] + end);
    }
    for (int32_t& token : tokens) {
      if (!is_text_of_scope({token}, row_at(row).scope)) token = row_at(row).mark;
      row_at(row).generated.push_back(token);
      append_token(row, token);
    }
    return static_cast<int64_t>(tokens.size());
  }

  int64_t sample(int64_t row) {
    constexpr int64_t kCounts[] = {0, 1, 2, 5, 30, 300};
    if (row_at(row).has_ended) begin_request(row);
    const int64_t room = kCapacity - lengths_.data()[row];
    const int64_t count = std::min(kCounts[choices_.below(6)], room);
    const bool ends = choices_.one_in(40) || count + 50 > room;  // repeat_edge() appends up to 31 tokens
    row_at(row).has_ended = ends;
    const int64_t block = choose_block();
    if (!ends && choices_.one_in(4) && scope_of_block(block) == row_at(row).scope) return repeat_edge(row, block);
    for (int64_t left = count; left-- > 0;) {
      append_token(row, ends && hold_back_ ? kGarbage : generate(row_at(row)));
    }
    return count;
  }

  const char* run_event() {
    if (corrupt_) overwrite_words();
    if (model_.next_number() == Model::kEnd && choices_.one_in(8)) return renumber();
    switch (choices_.below(48)) {
      case 0: return clear();
      case 1: return renumber();
      case 2: return damage();
      case 3:
      case 4:
      case 5:
      case 6: return reassign();
      default: return step();
    }
  }

  void overwrite_words() {
    for (int64_t left = choices_.below(20); left-- > 0;) {
      int32_t* const words[] = {text_[choices_.below(num_blocks_)] + choices_.below(256),
                                blocks_[choices_.below(num_blocks_)] + choices_.below(6),
                                table_[choices_.below(6)] + choices_.below(2 * columns_),
                                slots_[choices_.below(batch_)] + choices_.below(4),
                                allocator_.data() + choices_.below(2)};
      *any_of(words) = choices_.one_in(2) ? any_of(kHostile) : static_cast<int32_t>(choices_.below(num_blocks_ * 512));
    }
  }

  // Does what NgramStore.clear does.
  const char* clear() {
    const int64_t scope = choose_scope();
    for (int64_t row = 0; row < num_blocks_; ++row) {
      if (scope_of_block(row) != scope) continue;
      std::fill_n(text_[row], 256, 0);
      std::fill_n(blocks_[row], 8, 0);
    }
    model_.clear(scope);
    ++event_counts_["scopes cleared"];
    return has_equal_stores() ? nullptr : "the stores differ after an event";
  }

  int64_t scope_of_block(int64_t row) const {
    const auto high = static_cast<uint64_t>(static_cast<uint32_t>(blocks_[row][kScopeHigh]));
    return static_cast<int64_t>(high << 32 | static_cast<uint32_t>(blocks_[row][kScopeLow]));
  }

  int64_t fill_of(int64_t row) const { return std::min<int64_t>(std::max(blocks_[row][kFill], 0), 256); }

  // Does what NgramStore.begin_step does before the block numbers run out.
  const char* renumber() {
    const int64_t offset = std::max<int64_t>((int64_t{allocator_.data()[0]} - 1) / num_blocks_ - 1, 0) * num_blocks_;
    const auto reduce = [](int32_t* words, int64_t count, int64_t by) {
      for (; count > 0; --count, ++words) *words = static_cast<int32_t>(std::max<int64_t>(*words - by, 0));
    };
    for (int64_t row = 0; row < batch_; ++row) reduce(slots_[row], 1, offset);
    for (int64_t row = 0; row < num_blocks_; ++row) reduce(blocks_[row], 3, offset);
    for (int64_t level = 0; level < Model::kLevels; ++level) reduce(table_[level], 2 * columns_, offset * 256);
    reduce(allocator_.data(), 2, offset);
    model_.renumber(offset);
    event_counts_["renumberings"] += offset > 0;
    return has_equal_stores() ? nullptr : "the stores differ after an event";
  }

  // Replaces a block by a block of another scope, out of order, so that a block may also lose its successor. The texts
  // of both may be equal except for the marks.
  const char* reassign() {
    int64_t row = choices_.below(num_blocks_);
    if (const int32_t neighbour = blocks_[row][choices_.one_in(4) ? kNext : kPrevious]; neighbour > 0)
      row = neighbour % num_blocks_;
    const int64_t old = blocks_[row][kNumber], number = old + num_blocks_;
    if (old <= 0) return nullptr;
    Row writer = make_request({});
    const int64_t fill = choices_.one_in(2) ? fill_of(row) : choices_.between(1, 256);
    const bool is_copy = choices_.one_in(2);
    for (int64_t at = 0; at < fill; ++at) {
      if (is_copy) text_[row][at] = is_mark(text_[row][at]) ? writer.mark : text_[row][at];
      if (!is_copy) text_[row][at] = generate(writer);
    }
    const auto bits = static_cast<uint64_t>(writer.scope);
    const int64_t head[] = {number, 0, 0, fill, static_cast<int64_t>(bits), static_cast<int64_t>(bits >> 32)};
    std::transform(head, head + 6, blocks_[row], [](int64_t word) { return static_cast<int32_t>(word); });
    if (!corrupt_) model_.reassign(old, {writer.scope, 0, 0, {text_[row], text_[row] + fill}});
    ++event_counts_["blocks reassigned"];
    return has_equal_stores() ? nullptr : "the stores differ after an event";
  }

  // Overwrites entries, a fill and a slot. A slot never gets another slot's block.
  const char* damage() {
    for (int64_t left = choices_.between(1, 6); left-- > 0;) {
      const int64_t level = choices_.below(6), column = choices_.below(columns_);
      const int64_t near = blocks_[choices_.below(num_blocks_)][kNumber] * int64_t{256} + choices_.below(256);
      const auto position = static_cast<int32_t>(choices_.one_in(4) ? -1 - near : near);
      Model::Entry& entry = model_.table_row(level)[static_cast<size_t>(column)];
      const int64_t word = choices_.below(2);
      (word == 0 ? entry.newest : entry.second) = table_[level][2 * column + word] = position;
    }
    const int64_t block = choices_.below(num_blocks_);
    if (blocks_[block][kNumber] > 0 && !corrupt_) {
      blocks_[block][kFill] = static_cast<int32_t>(choices_.between(0, fill_of(block)));
      model_.shorten(blocks_[block][kNumber], blocks_[block][kFill]);
    }
    const int64_t row = choices_.below(batch_), slot = (row + first_slot_) % batch_;
    if (has_hostile_arguments_ && choices_.one_in(2)) {  // a request that continues long before the end of its row
      const auto length = static_cast<int32_t>(choices_.below(std::min(lengths_.data()[row], 20)));
      slots_[slot][1] = length + 1;
      slots_[slot][3] = static_cast<int32_t>(choices_.between(length, lengths_.data()[row]));
      slots_[slot][2] = Model::slot_key({tokens_[row], 0, 0, row_at(row).scope, 0}, slots_[slot][3]);
    } else {
      const int64_t word = choices_.below(4);
      slots_[slot][word] = any_of(kHostile);
      if (word == 0) {  // no block, or one that is not assigned yet
        const int32_t number = blocks_[choices_.below(num_blocks_)][kNumber];
        slots_[slot][0] = number >= model_.next_number() ? number : any_of({INT32_MIN, -1, 0, INT32_MAX});
      }
    }
    model_.slots()[static_cast<size_t>(slot)] = {slots_[slot][0], slots_[slot][1], slots_[slot][2], slots_[slot][3]};
    ++event_counts_["entries, fills and slots overwritten"];
    return has_equal_stores() ? nullptr : "the stores differ after an event";
  }

  // Both operators, with the next tokens of some requests.
  const char* step() {
    Step step;
    const int64_t count = choices_.between(1, batch_), first = choices_.below(batch_);
    if (choices_.one_in(50)) first_slot_ = choices_.below(batch_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (first + i) % batch_;
      sampled_.data()[i] = static_cast<int32_t>(sample(row));
      step.rows.push_back(row);
      step.slots.push_back((row + first_slot_) % batch_);
      step.scopes.push_back(row_at(row).scope);
    }
    const std::vector<int32_t> lengths = lengths_.values();
    if (has_hostile_arguments_ && choices_.one_in(3)) change_argument(step);
    ++event_counts_["steps"];
    const char* error = append(step);
    if (error == nullptr) error = propose(step);
    std::copy(lengths.begin(), lengths.end(), lengths_.data());
    return error;
  }

  void change_argument(Step& step) {
    constexpr int64_t kIndices[] = {INT64_MIN, -1, INT64_MAX};
    const int64_t i = choices_.below(step.count());
    switch (choices_.below(5)) {
      case 4: step.scopes[static_cast<size_t>(i)] = kPrivateScope; break;
      case 0: sampled_.data()[i] = any_of(kHostile); break;
      case 1:
        lengths_.data()[step.rows[static_cast<size_t>(i)]] =
            any_of({INT32_MIN, -1, 0, int32_t{kCapacity + 1}, INT32_MAX});
        break;
      case 2: step.rows[static_cast<size_t>(i)] = choices_.one_in(4) ? batch_ : any_of(kIndices); break;
      default: step.slots[static_cast<size_t>(i)] = choices_.one_in(4) ? batch_ : any_of(kIndices);
    }
    ++event_counts_["hostile arguments"];
  }

  // Request i as the model gets it; its length is 0 if the operators ignore it.
  Model::Request request_of(const Step& step, int64_t i) const {
    const auto at = static_cast<size_t>(i);
    const int64_t row = step.rows[at], sampled = sampled_.data()[i];
    if (row < 0 || row >= batch_ || sampled <= 0 || step.scopes[at] == kPrivateScope) return {};
    const int64_t length = lengths_.data()[row];
    if (length < 1 || length > kCapacity) return {};
    return {tokens_[row], length, sampled, step.scopes[at], step.slots[at]};
  }

  template <class Params>
  Params make_params(const Step& step) const {
    Params p{};
    p.token_ids = tokens_.view<const int32_t>();
    p.num_tokens = lengths_.data();
    p.num_sampled = sampled_.data();
    p.row_indices = {step.rows.data(), 8};
    p.scopes = {step.scopes.data(), 8};
    p.batch = step.count();
    using Word = std::remove_pointer_t<decltype(p.contents.text.data)>;
    p.contents = {text_.view<Word>(), blocks_.view<Word>(), table_.view<Word>()};
    return p;
  }

  const char* append(const Step& step) {
    auto p = make_params<StoreAppendParams>(step);
    p.slot_indices = {step.slots.data(), 8};
    p.slots = slots_.view();
    p.allocator = allocator_.data();
    p.max_new = max_new_;
    p.hold_back = hold_back_;
    ngram_npu_cpu_store_append_(&p, nullptr);
    if (corrupt_) return nullptr;
    std::vector<Model::Request> requests;
    for (int64_t i = 0; i < step.count(); ++i) {
      const Model::Request request = request_of(step, i);
      if (request.length > 0 && request.slot >= 0 && request.slot < batch_) requests.push_back(request);
    }
    event_counts_["steps after the last block number"] += model_.next_number() == Model::kEnd;
    model_.append(requests, max_new_, hold_back_);
    return has_equal_stores() ? nullptr : "the stores differ after an append";
  }

  const char* propose(const Step& step) {
    auto p = make_params<StoreProposeParams>(step);
    p.draft_token_ids = {drafts_[0], drafts_.view().stride, 4};
    p.k = k_;
    p.num_draft_tokens = counts_.data();
    p.match_len = match_.data();
    p.max_len = choices_.one_in(12) ? any_of({INT64_MIN, int64_t{0}, int64_t{60}, kCapacity}) : INT64_MAX;
    p.agreement = agreement_.data();
    p.vocab_size = choices_.one_in(4) ? any_of({INT64_MIN, int64_t{0}, int64_t{1}, int64_t{6}, int64_t{9}, INT64_MAX})
                                      : int64_t{INT32_MAX};
    p.fill = choices_.one_in(2);
    for (int64_t i = 0; i < batch_; ++i) {
      std::fill_n(drafts_[i], k_, 77);
      match_.data()[i] = choices_.one_in(8) ? static_cast<int32_t>(choices_.below(18)) : 0;
      if (has_hostile_arguments_ && choices_.one_in(16)) match_.data()[i] = any_of(kHostile);
      counts_.data()[i] = agreement_.data()[i] = static_cast<int32_t>(i);
    }
    const std::vector<int32_t> own = match_.values();
    ngram_npu_cpu_store_propose_(&p, nullptr);
    if (corrupt_) return nullptr;
    for (int64_t i = 0; i < batch_; ++i) {
      const Model::Request request = i < step.count() ? request_of(step, i) : Model::Request{};
      const int64_t own_len = own[static_cast<size_t>(i)];
      const int64_t budget = p.max_len > request.length ? std::min(k_, p.max_len - request.length) : 0;
      Model::Draft draft;
      if (request.length > 0 && budget > 0) draft = model_.propose(request, own_len, budget, p.vocab_size);
      std::vector<int32_t> expected(static_cast<size_t>(k_), 77);
      auto count = static_cast<int64_t>(draft.tokens.size());
      if (count > 0) {
        const int32_t newest = request.row[request.length - 1];
        const int32_t padding = !p.fill || p.vocab_size <= 0 ? -1 : newest >= 0 && newest < p.vocab_size ? newest : 0;
        std::fill(expected.begin(), expected.end(), padding);
        std::copy(draft.tokens.begin(), draft.tokens.end(), expected.begin());
        if (!is_text_of_scope(draft.tokens, request.scope)) return "text of another scope was drafted";
        ++event_counts_["drafts"];
        event_counts_["drafts after 16 tokens"] += draft.match_len == 16;
      } else {
        draft.match_len = own_len;
        count = i;
      }
      const bool is_equal = std::equal(expected.begin(), expected.end(), drafts_[i]) && counts_.data()[i] == count &&
                            match_.data()[i] == draft.match_len &&
                            agreement_.data()[i] == (i < step.count() ? draft.agreement : i);
      if (!is_equal) return "the drafts differ";
    }
    return nullptr;
  }

  bool is_mark(int32_t token) const {
    return token >= kFirstMark && token - kFirstMark < static_cast<int64_t>(scopes_.size());
  }

  // No draft contains a prompt, or tokens after the end of a request.
  bool is_text_of_scope(const std::vector<int32_t>& draft, int64_t scope) const {
    return std::all_of(draft.begin(), draft.end(), [&](int32_t token) {
      if (is_mark(token)) return scopes_[static_cast<size_t>(token - kFirstMark)] == scope;
      return token < kFirstPrompt || token == INT32_MAX || has_hostile_arguments_;
    });
  }

  static bool is_not_zero(int32_t word) { return word != 0; }

  bool has_equal_stores() {
    if (corrupt_) return true;
    int64_t num_blocks = 0;
    for (int64_t row = 0; row < num_blocks_; ++row) {
      const int32_t* const head = blocks_[row];
      if (head[kNumber] == 0) continue;
      ++num_blocks;
      const auto found = model_.blocks().find(head[kNumber]);
      if (head[kNumber] % num_blocks_ != row || found == model_.blocks().end()) return false;
      const Model::Block& block = found->second;
      const bool is_equal = head[kPrevious] == block.previous && head[kNext] == block.next &&
                            head[kFill] == static_cast<int64_t>(block.tokens.size()) &&
                            scope_of_block(row) == block.scope && head[6] == 0 && head[7] == 0;
      if (!is_equal || !std::equal(block.tokens.begin(), block.tokens.end(), text_[row])) return false;
      if (!block.is_shortened && std::any_of(text_[row] + block.tokens.size(), text_[row] + 256, is_not_zero))
        return false;
    }
    if (num_blocks != static_cast<int64_t>(model_.blocks().size())) return false;
    for (int64_t level = 0; level < Model::kLevels; ++level) {
      const int32_t* words = table_[level];
      for (const Model::Entry& entry : model_.table_row(level)) {
        if (*words++ != entry.newest || *words++ != entry.second) return false;
      }
    }
    for (int64_t i = 0; i < batch_; ++i) {
      const Model::Slot& slot = model_.slots()[static_cast<size_t>(i)];
      const int32_t* const words = slots_[i];
      if (words[0] != slot.block || words[1] != slot.length || words[2] != slot.key || words[3] != slot.row_length ||
          std::any_of(words + 4, words + 8, is_not_zero))
        return false;
    }
    return allocator_.data()[0] == model_.next_number() && allocator_.data()[1] == model_.next_number();
  }

  Choices& choices_;
  const bool corrupt_, hold_back_, has_hostile_arguments_;
  const int64_t batch_, num_blocks_, columns_, num_scopes_, k_, max_new_;
  GuardedRows<int32_t> text_, blocks_, table_, slots_;
  Guarded<int32_t> allocator_;
  GuardedRows<int32_t> tokens_;
  Guarded<int32_t> lengths_, sampled_;
  GuardedRows<int32_t> drafts_;
  Guarded<int32_t> counts_, match_, agreement_;
  std::vector<Row> rows_;
  std::vector<int64_t> scopes_;                    // of the marks
  std::map<int64_t, std::vector<int32_t>> ended_;  // the latest ended request's text, by scope
  int64_t first_slot_ = 0;
  uint64_t state_ = 1;
  Model model_;
  EventCounts event_counts_ = {{"steps", 0},
                               {"drafts", 0},
                               {"drafts after 16 tokens", 0},
                               {"steps after the last block number", 0},
                               {"renumberings", 0},
                               {"scopes cleared", 0},
                               {"blocks reassigned", 0},
                               {"entries, fills and slots overwritten", 0},
                               {"hostile arguments", 0}};
};

}  // namespace ngram_npu::test
