// A store as docs/ops/store_append.md and docs/ops/store_propose.md define it, in maps and vectors. It uses no function
// of csrc/core, so that a fault there makes a difference. No gtest here: the fuzz target has none.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "choices.h"

namespace ngram_npu::test {

class StoreModel {
 public:
  static constexpr int64_t kBlock = 256, kLevels = 6, kEnd = int64_t{1} << 23;
  static constexpr int64_t kSizes[kLevels] = {1, 2, 3, 4, 8, 16};

  struct Block {
    int64_t scope, previous, next;
    std::vector<int32_t> tokens;
    bool is_shortened = false;  // by shorten() or reassign(): the memory has tokens after the last one
  };

  struct Slot {
    int32_t block, length, key, row_length;  // `length`: L + 1, or 0 without a request
  };

  struct Entry {
    int32_t newest, second;
  };

  struct Request {
    const int32_t* row;
    int64_t length, num_sampled, scope, slot;
  };

  struct Draft {
    std::vector<int32_t> tokens;
    int64_t match_len = 0, agreement = -2;
  };

  StoreModel(int64_t num_blocks, int64_t columns, int64_t num_slots, int64_t next)
      : num_blocks_(num_blocks), columns_(columns), next_(next), slots_(static_cast<size_t>(num_slots)) {
    table_.fill(std::vector<Entry>(static_cast<size_t>(columns)));
  }

  // The tokens of ignored requests are not in `requests`.
  void append(const std::vector<Request>& requests, int64_t max_new, bool hold_back) {
    const int64_t limit = std::min(num_blocks_ / 2, kEnd - next_);
    std::vector<Addition> additions;
    int64_t sum = 0, reserved = 0;
    for (const Request& request : requests) {
      Addition added = begin(request, max_new, hold_back);
      sum += (added.end - added.begin + kBlock - 1) / kBlock;
      if (sum <= limit) {
        reserved = sum;
      } else {
        added.begin = added.end;
        added.block = 0;
        ++event_counts_["requests that were not accepted"];
      }
      additions.push_back(added);
    }
    for (Addition& added : additions) {
      if (added.block <= next_ + reserved - 1 - num_blocks_) added.block = 0;
    }
    std::vector<std::pair<Entry*, int32_t>> inserted;
    for (const Addition& added : additions) write(added, &inserted);
    for (const auto& [entry, position] : inserted) {
      event_counts_["positions below the newest"] += position < entry->newest;
      entry->second = std::max(entry->second, std::min(entry->newest, position));
    }
    for (const auto& [entry, position] : inserted) entry->newest = std::max(entry->newest, position);
  }

  // Returns the draft from the store, empty if it has none. budget > 0.
  Draft propose(const Request& request, int64_t match_len, int64_t budget, int64_t vocab_size) {
    Draft untrusted;
    for (int64_t level = kLevels - 1; level >= 0; --level) {
      const int64_t n = kSizes[level];
      if (n > request.length || n <= match_len) continue;
      const Entry& at = entry(request.row + request.length, level, request.scope);
      std::vector<int32_t> draft = follow(request, at.newest, n, budget, vocab_size);
      const std::vector<int32_t> other = follow(request, at.second, n, budget, vocab_size);
      if (draft.empty()) continue;
      const bool is_trusted = other.empty() ? match_len < 2 || n >= 8 : draft[0] == other[0];
      if (!is_trusted && !(untrusted.tokens.empty() && match_len == 0)) continue;
      draft.erase(std::find_if(draft.begin(), draft.end(), [&](int32_t t) { return t < 0 || t >= vocab_size; }),
                  draft.end());
      int64_t agreement = other.empty() ? -1 : 0;
      while (agreement >= 0 && static_cast<size_t>(agreement) < std::min(draft.size(), other.size()) &&
             draft[static_cast<size_t>(agreement)] == other[static_cast<size_t>(agreement)])
        ++agreement;
      const bool is_partial = agreement > 0 && agreement < static_cast<int64_t>(draft.size());
      event_counts_["drafts that agree in part"] += is_partial;
      event_counts_["trusted drafts of one occurrence"] += is_trusted && agreement < 0;
      if (is_trusted) return {draft, n, agreement};
      event_counts_["n-grams that are not trusted"] += 1;
      untrusted = {draft, n, agreement};
    }
    return untrusted;
  }

  void clear(int64_t scope) {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      it = it->second.scope == scope ? blocks_.erase(it) : std::next(it);
    }
  }

  // Subtracts `offset` from all block numbers. Those that are not greater than it become 0.
  void renumber(int64_t offset) {
    const auto reduce = [](auto* number, int64_t by) {
      *number = static_cast<std::remove_pointer_t<decltype(number)>>(std::max<int64_t>(*number - by, 0));
    };
    std::map<int64_t, Block> blocks;
    for (auto& [number, block] : blocks_) {
      if (number <= offset) continue;
      reduce(&block.previous, offset);
      reduce(&block.next, offset);
      blocks[number - offset] = block;
    }
    blocks_ = blocks;
    for (Slot& slot : slots_) reduce(&slot.block, offset);
    for (auto& row : table_) {
      for (auto& [newest, second] : row) {
        reduce(&newest, offset * kBlock);
        reduce(&second, offset * kBlock);
      }
    }
    reduce(&next_, offset);
  }

  // Gives the row of block `number` to a later block, out of order.
  void reassign(int64_t number, const Block& block) {
    blocks_.erase(number);
    blocks_[number + num_blocks_] = block;
    blocks_[number + num_blocks_].is_shortened = true;
  }

  // Drops the tokens of a block from `fill` on.
  void shorten(int64_t number, int64_t fill) {
    blocks_.at(number).tokens.resize(static_cast<size_t>(fill));
    blocks_.at(number).is_shortened = true;
  }

  static int32_t slot_key(const Request& request, int64_t length) {
    const uint64_t key = key_of(request.row + length, std::min<int64_t>(length, 16), request.scope, kLevels);
    return static_cast<int32_t>(static_cast<uint32_t>(key));
  }

  const std::map<int64_t, Block>& blocks() const { return blocks_; }
  std::vector<Slot>& slots() { return slots_; }
  std::vector<Entry>& table_row(int64_t level) { return table_[static_cast<size_t>(level)]; }
  int64_t next_number() const { return next_; }
  const EventCounts& event_counts() const { return event_counts_; }

 private:
  struct Addition {
    const Request* request;
    int64_t begin, end, block;
  };

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // The key of the last n tokens before `end`.
  static uint64_t key_of(const int32_t* end, int64_t n, int64_t scope, int64_t level) {
    constexpr uint64_t kBase = 0x9e3779b97f4a7c15u;
    uint64_t hash = 0, power = 1;
    for (int64_t j = 0; j < n; ++j) {
      hash += static_cast<uint32_t>(*(end - 1 - j)) * power;
      power *= kBase;
    }
    return mix((hash ^ mix(static_cast<uint64_t>(scope))) + static_cast<uint64_t>(level + 1) * kBase);
  }

  Entry& entry(const int32_t* end, int64_t level, int64_t scope) {
    const uint64_t column = key_of(end, kSizes[level], scope, level) % static_cast<uint64_t>(columns_);
    return table_row(level)[static_cast<size_t>(column)];
  }

  Block* find(int64_t number, int64_t scope) {
    const auto it = blocks_.find(number);
    return it != blocks_.end() && it->second.scope == scope ? &it->second : nullptr;
  }

  Addition begin(const Request& request, int64_t max_new, bool hold_back) {
    const int64_t num_old = request.length - std::min(request.num_sampled, request.length);
    const int64_t end = hold_back ? num_old : request.length;
    const Slot& slot = slots_[static_cast<size_t>(request.slot)];
    const int64_t stored = int64_t{slot.length} - 1;
    event_counts_["rows that grew elsewhere"] += stored >= 0 && slot.row_length < num_old;
    if (stored >= 0 && stored <= end && end - stored <= max_new && slot.row_length == num_old &&
        slot.key == slot_key(request, num_old)) {
      const bool is_found = slot.block < next_ && find(slot.block, request.scope) != nullptr;
      return {&request, stored, end, is_found ? slot.block : 0};
    }
    return {&request, std::max(num_old, end - max_new), end, 0};
  }

  void write(const Addition& added, std::vector<std::pair<Entry*, int32_t>>* inserted) {
    const auto& [request, begin, end, first] = added;
    int64_t number = first, chain = 0;  // tokens before the next one in the request's chain of blocks
    Block* block = number > 0 ? &blocks_.at(number) : nullptr;
    if (block != nullptr) chain = (block->previous > 0 ? 16 : 0) + length_of(*block);
    for (int64_t place = begin; place < end; ++place, ++chain) {
      if (block == nullptr || length_of(*block) == kBlock) {
        if (block != nullptr) block->next = next_;
        replace_block(next_, request->scope);
        blocks_[next_] = {request->scope, number, 0, {}, false};
        number = next_++;
        block = &blocks_.at(number);
      }
      const int64_t position = number * kBlock + length_of(*block);
      block->tokens.push_back(request->row[place]);
      for (int64_t level = 0; level < kLevels; ++level) {
        if (kSizes[level] > std::min(chain, place)) continue;
        inserted->emplace_back(&entry(request->row + place, level, request->scope), static_cast<int32_t>(position));
      }
    }
    slots_[static_cast<size_t>(request->slot)] = {static_cast<int32_t>(number), static_cast<int32_t>(end + 1),
                                                  slot_key(*request, request->length),
                                                  static_cast<int32_t>(request->length)};
  }

  // Removes the block that block `number` replaces.
  void replace_block(int64_t number, int64_t scope) {
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      if ((it->first - number) % num_blocks_ != 0) {
        ++it;
        continue;
      }
      const bool is_half_filled = length_of(it->second) < kBlock && it->second.scope != scope;
      event_counts_["half-filled blocks given to another scope"] += is_half_filled;
      it = blocks_.erase(it);
    }
  }

  // The tokens from a position on, empty if it is not after the row's last n tokens or its token is not a valid id.
  std::vector<int32_t> follow(const Request& request, int32_t position, int64_t n, int64_t budget, int64_t vocab_size) {
    const int32_t* const row_end = request.row + request.length;
    const Block* const block = find(position / kBlock, request.scope);
    const int64_t offset = position % kBlock;
    if (block == nullptr || offset >= length_of(*block)) return {};
    std::vector<int32_t> before;
    if (offset < n) {
      const Block* const previous = find(block->previous, request.scope);
      event_counts_["evicted predecessors"] += block->previous > 0 && previous == nullptr;
      if (previous == nullptr || length_of(*previous) < kBlock) return {};
      before = previous->tokens;
    }
    before.insert(before.end(), block->tokens.begin(), block->tokens.begin() + offset);
    if (!std::equal(row_end - n, row_end, before.end() - n)) return {};
    std::vector<int32_t> after(block->tokens.begin() + offset, block->tokens.end());
    if (after[0] < 0 || after[0] >= vocab_size) return {};
    if (length_of(*block) == kBlock && static_cast<int64_t>(after.size()) < budget) {
      const Block* const successor = find(block->next, request.scope);
      if (successor != nullptr) after.insert(after.end(), successor->tokens.begin(), successor->tokens.end());
      event_counts_["evicted successors"] += block->next > 0 && successor == nullptr;
      event_counts_["drafts of two blocks"] += successor != nullptr;
    }
    after.resize(static_cast<size_t>(std::min(budget, static_cast<int64_t>(after.size()))));
    return after;
  }

  static int64_t length_of(const Block& block) { return static_cast<int64_t>(block.tokens.size()); }

  const int64_t num_blocks_, columns_;
  int64_t next_;
  std::map<int64_t, Block> blocks_;  // those in the ring, by number
  std::vector<Slot> slots_;
  std::array<std::vector<Entry>, kLevels> table_;
  EventCounts event_counts_ = {{"requests that were not accepted", 0},
                               {"half-filled blocks given to another scope", 0},
                               {"evicted predecessors", 0},
                               {"evicted successors", 0},
                               {"drafts of two blocks", 0},
                               {"drafts that agree in part", 0},
                               {"positions below the newest", 0},
                               {"trusted drafts of one occurrence", 0},
                               {"n-grams that are not trusted", 0},
                               {"rows that grew elsewhere", 0}};
};

}  // namespace ngram_npu::test
