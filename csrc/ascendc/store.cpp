// AscendC kernels of the store's operators. plans.h plans their launches.
//
// An append has three launches. In the first one, one core plans the appends in the order of the batch, so that ranks
// with different numbers of cores assign the same blocks. The second one copies the newest entries of all n-grams to
// be inserted to the second newest; the third one writes text, heads, slots and newest entries. No launch reads a word
// that it changes atomically. Entries are the only words that several cores change; a block's text and head, and a
// slot, belong to one request of a call, and one core writes them. A lookup is a launch of its own.
#include "core/store.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

using namespace store;

// The words of a StoreAppend.
union AppendWords {
  StoreAppend append;
  int32_t words[kStoreAppendWords];
};

// The appends of a group of requests, staged in the unified buffer.
class StagedAppends : public StagedAppendsLayout {
 public:
  __aicore__ inline StagedAppends(AscendC::TPipe& pipe, int64_t capacity)
      : words_(pipe, capacity * kStoreAppendWords) {}

  __aicore__ inline void load(uint64_t workspace, int64_t first, int64_t count) {
    words_.load(0, Gm<const int32_t>(workspace) + first * kStoreAppendWords, count * kStoreAppendWords);
  }
  __aicore__ inline void store(uint64_t workspace, int64_t first, int64_t count) const {
    words_.store(0, Gm<int32_t>(workspace) + first * kStoreAppendWords, count * kStoreAppendWords);
  }
  __aicore__ inline StoreAppend get(int64_t j) const {
    AppendWords converter;
    for (int64_t w = 0; w < kStoreAppendWords; ++w) converter.words[w] = words_.get(j * kStoreAppendWords + w);
    return converter.append;
  }
  __aicore__ inline void set(int64_t j, const StoreAppend& append) {
    const AppendWords converter{append};
    for (int64_t w = 0; w < kStoreAppendWords; ++w) words_.set(j * kStoreAppendWords + w, converter.words[w]);
  }

 private:
  LocalBuffer<int32_t> words_;
};

// Plans all appends of a call: begin() for each group of requests, then finish() for each group.
class AppendPlanner : public AppendPlannerLayout {
 public:
  __aicore__ inline AppendPlanner(AscendC::TPipe& pipe, const StoreAppendParams& p, const CoreTiling& core_tiling,
                                  uint64_t workspace)
      : p_(p),
        workspace_(workspace),
        limit_(max_new_blocks(p)),
        next_(next_number(p)),
        appends_(pipe, core_tiling.per_pass),
        slots_(pipe, core_tiling.per_pass * kSlotWords),
        old_tokens_(pipe, core_tiling.per_pass * kMaxSize),
        heads_(pipe, core_tiling.per_pass * kHeadWords),
        allocator_(pipe, kAllocatorWords) {}

  // Decides what the requests store, and finds the blocks that they continue. The slots, the ends of the rows and the
  // heads of all requests are each loaded with one wait.
  __aicore__ inline void begin(int64_t first, int64_t count) {
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    for (int64_t j = 0; j < count; ++j) {
      const AppendRequest request = requests_[j] = append_request(p_, first + j);
      if (request.length == 0) continue;
      const int64_t num_tokens = smaller(request.num_old, kMaxSize);
      slots_.load(j * kSlotWords, p_.slots[request.slot], kSlotRowLength + 1);
      old_tokens_.load(j * kMaxSize, p_.token_ids[request.row] + (request.num_old - num_tokens), num_tokens);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const AppendRequest& request = requests_[j];
      plans_[j] = {};
      if (request.length == 0) continue;
      const int64_t num_tokens = smaller(request.num_old, kMaxSize);
      const UbWords old_end{old_tokens_, j * kMaxSize + num_tokens};
      plans_[j] = choose_tokens(p_, request, UbWords{slots_, j * kSlotWords}, old_end);
      if (plans_[j].block == 0) continue;
      heads_.load(j * kHeadWords, p_.contents.blocks[ring_row(p_.contents, plans_[j].block)], kScopeHigh + 1);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    sync_pipes<AscendC::HardEvent::MTE3_S>();
    for (int64_t j = 0; j < count; ++j) {
      if (plans_[j].block > 0) continue_block(UbWords{heads_, j * kHeadWords}, requests_[j].scope, &plans_[j]);
      reserved_ += blocks_for_tokens(plans_[j].count);
      if (reserved_ <= limit_) num_reserved_ = reserved_;
      appends_.set(j, plans_[j]);
    }
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    appends_.store(workspace_, first, count);
  }

  // Assigns the requests' new blocks.
  __aicore__ inline void finish(int64_t first, int64_t count) {
    if (first == 0) reserved_ = 0;
    sync_pipes<AscendC::HardEvent::MTE3_MTE2>();
    appends_.load(workspace_, first, count);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      StoreAppend append = appends_.get(j);
      reserved_ += blocks_for_tokens(append.count);
      plan_blocks(p_, reserved_, num_reserved_, &append);
      append.first_block = static_cast<int32_t>(next_);
      next_ += append.num_blocks;
      appends_.set(j, append);
    }
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    appends_.store(workspace_, first, count);
  }

  // Only this core reads the allocator, so it may write both words.
  __aicore__ inline void store_next_number() {
    allocator_.set(kNextNumber, static_cast<int32_t>(next_));
    allocator_.set(kPlannedNumber, static_cast<int32_t>(next_));
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    allocator_.store(0, p_.allocator, kAllocatorWords);
  }

 private:
  const StoreAppendParams& p_;
  const uint64_t workspace_;
  const int64_t limit_;  // of new blocks in this call
  int64_t next_;         // the next block number
  StagedAppends appends_;
  LocalBuffer<int32_t> slots_, old_tokens_, heads_, allocator_;
  AppendRequest requests_[kMaxPlannedRequests];
  StoreAppend plans_[kMaxPlannedRequests];
  int64_t reserved_ = 0;      // of plan_blocks()
  int64_t num_reserved_ = 0;  // of plan_blocks()
};

__aicore__ inline void plan_appends(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<StoreAppendParams>(args.params);
  const CoreTiling core_tiling = read_as<StoreAppendTiling>(args.tiling).requests;
  AscendC::TPipe pipe;
  AppendPlanner planner(pipe, p, core_tiling, args.workspace);
  const int64_t step = core_tiling.per_pass;
  for (int64_t first = 0; first < p.batch; first += step) planner.begin(first, smaller(step, p.batch - first));
  for (int64_t first = 0; first < p.batch; first += step) planner.finish(first, smaller(step, p.batch - first));
  planner.store_next_number();
}

// A part of a request's new tokens, whose n-grams a core inserts.
struct AppendPart {
  int64_t i;  // batch position
  StoreAppend append;
  int64_t begin, end;  // tokens of the append
  bool is_first;       // of the request's parts
};

// Calls process(part) for the parts of this core. The tokens of a request are divided into `spans` parts.
template <class Process>
__aicore__ inline void for_each_part(AscendC::TPipe& pipe, const StoreAppendParams& p, const StoreAppendTiling& tiling,
                                     uint64_t workspace, const Process& process) {
  StagedAppends appends(pipe, tiling.parts.per_pass);
  const int64_t num_parts = p.batch * tiling.spans;
  for (int64_t first = first_item(tiling.parts); first < num_parts; first += pass_stride(tiling.parts)) {
    const int64_t end = smaller(first + tiling.parts.per_pass, num_parts);
    const int64_t first_request = first / tiling.spans, last_request = (end - 1) / tiling.spans;
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    appends.load(workspace, first_request, last_request - first_request + 1);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t part = first; part < end; ++part) {
      const int64_t i = part / tiling.spans, span = part % tiling.spans;
      const StoreAppend append = appends.get(i - first_request);
      if (append.is_active == 0) continue;
      const int64_t size = (append.count + tiling.spans - 1) / tiling.spans;
      process(AppendPart{i, append, smaller<int64_t>(span * size, append.count),
                         smaller<int64_t>((span + 1) * size, append.count), span == 0});
    }
  }
}

// Raises words of the entries of all n-grams of a part by an atomic maximum, a tile of tokens at a time. Each entry's
// value is in a unit of 32 bytes, because a copy begins there.
template <Entry word>
class EntryUpdater : public EntryUpdaterLayout {
 public:
  __aicore__ inline EntryUpdater(AscendC::TPipe& pipe, const StoreAppendParams& p, int64_t tile_tokens)
      : p_(p),
        tile_tokens_(tile_tokens),
        tokens_(pipe, kMaxSize + tile_tokens),
        newest_(pipe, tile_tokens * kSizes * kUnitItems),
        values_(pipe, tile_tokens * kSizes * kUnitItems) {}

  __aicore__ inline void update(const AppendPart& part) {
    for (int64_t begin = part.begin; begin < part.end; begin += tile_tokens_)
      update_tile(part, begin, smaller(begin + tile_tokens_, part.end));
  }

 private:
  __aicore__ inline void update_tile(const AppendPart& part, int64_t begin, int64_t end) {
    const uint64_t seed = seed_of_scope(scope_of(p_.scopes, part.i));
    const Gm<const int32_t> row = p_.token_ids[p_.row_indices[part.i]];
    const int64_t place = part.append.begin + begin;  // in the row
    const int64_t num_before = smaller(place, kMaxSize);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    tokens_.load(0, row + (place - num_before), num_before + end - begin);
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    int64_t count = 0;
    for (int64_t t = begin; t < end; ++t) {
      const UbWords ngram_end{tokens_, num_before + t - begin};
      for_each_ngram(ngram_end, max_ngram_size(part.append, t), [&](int64_t level, uint64_t hash) {
        entries_[count] = entry_of(p_.contents.table, hash, seed, level);
        positions_[count] = position_of(part.append, t);
        if (word == kSecond) newest_.load(count * kUnitItems, entries_[count] + kNewest, 1);
        ++count;
      });
    }
    if constexpr (word == kSecond) sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t n = 0; n < count; ++n) {
      const int64_t unit = n * kUnitItems;
      values_.set(unit, word == kSecond ? smaller(newest_.get(unit), positions_[n]) : positions_[n]);
    }
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    AscendC::SetAtomicMax<int32_t>();
    for (int64_t n = 0; n < count; ++n) values_.store(n * kUnitItems, entries_[n] + word, 1);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
    AscendC::SetAtomicNone();
  }

  const StoreAppendParams& p_;
  const int64_t tile_tokens_;
  LocalBuffer<int32_t> tokens_, newest_;
  LocalBuffer<int32_t, AscendC::TPosition::VECOUT> values_;  // only copies from VECOUT can be atomic
  Gm<int32_t> entries_[kMaxTileTokens * kSizes];
  int32_t positions_[kMaxTileTokens * kSizes];
};

// The second launch: second newest = max(second newest, min(newest, position)).
__aicore__ inline void copy_entries(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<StoreAppendParams>(args.params);
  const auto tiling = read_as<StoreAppendTiling>(args.tiling);
  AscendC::TPipe pipe;
  EntryUpdater<kSecond> updater(pipe, p, tiling.tile_tokens);
  for_each_part(pipe, p, tiling, args.workspace, [&updater](const AppendPart& part) { updater.update(part); });
}

// Writes a request's text to the store, the heads of its blocks, and its slot.
class TextWriter : public TextWriterLayout {
 public:
  __aicore__ inline TextWriter(AscendC::TPipe& pipe, const StoreAppendParams& p)
      : p_(p), text_(pipe, kBlockTokens), zeros_(pipe, kBlockTokens), words_(pipe, kHeadWords + kSlotWords) {
    AscendC::Duplicate(zeros_.tensor(), 0, static_cast<int32_t>(kBlockTokens));
    sync_pipes<AscendC::HardEvent::V_MTE3>();
  }

  __aicore__ inline void write(const StoreAppend& append, int64_t i) {
    write_text(append, p_.token_ids[p_.row_indices[i]] + append.begin);
    write_heads(append, scope_of(p_.scopes, i));
    set_slot(p_, append, i, UbWords{words_, kHeadWords});
    // The words from `first` on change in the head of the block that the request continued.
    const int64_t first = append.num_blocks > 0 ? kNext : kFill;
    if (append.block > 0) set_continued_head(append, UbWords{words_, -first});
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    words_.store(kHeadWords, p_.slots[slot_of(p_, i)], kSlotRowLength + 1);
    if (append.block > 0) {
      const int64_t row = ring_row(p_.contents, append.block);
      words_.store(0, p_.contents.blocks[row] + first, kFill + 1 - first);
    }
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  // The tokens are copied by blocks, then zeros up to the end of the last new block.
  __aicore__ inline void write_text(const StoreAppend& append, Gm<const int32_t> tokens) {
    for (int64_t t = 0; t < append.count;) {
      const int64_t position = position_of(append, t);
      const int64_t count = smaller<int64_t>(kBlockTokens - position % kBlockTokens, append.count - t);
      sync_pipes<AscendC::HardEvent::MTE3_MTE2>();
      text_.load(0, tokens + t, count);
      sync_pipes<AscendC::HardEvent::MTE2_MTE3>();
      text_.store(0, text_at(position), count);
      t += count;
    }
    const int64_t num_zeros = num_written_tokens(append) - append.count;
    if (num_zeros > 0) zeros_.store(0, text_at(position_of(append, append.count)), num_zeros);
  }
  __aicore__ inline Gm<int32_t> text_at(int64_t position) const {
    return p_.contents.text[ring_row(p_.contents, position / kBlockTokens)] + position % kBlockTokens;
  }

  __aicore__ inline void write_heads(const StoreAppend& append, int64_t scope) {
    for (int64_t j = 0; j < append.num_blocks; ++j) {
      set_new_head(append, scope, j, UbWords{words_, 0});
      sync_pipes<AscendC::HardEvent::S_MTE3>();
      words_.store(0, p_.contents.blocks[ring_row(p_.contents, append.first_block + j)], kScopeHigh + 1);
      sync_pipes<AscendC::HardEvent::MTE3_S>();
    }
  }

  const StoreAppendParams& p_;
  LocalBuffer<int32_t> text_, zeros_, words_;
};

// The third launch: newest = max(newest, position), and everything else that an append writes.
__aicore__ inline void write_appends(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<StoreAppendParams>(args.params);
  const auto tiling = read_as<StoreAppendTiling>(args.tiling);
  AscendC::TPipe pipe;
  EntryUpdater<kNewest> updater(pipe, p, tiling.tile_tokens);
  TextWriter writer(pipe, p);
  for_each_part(pipe, p, tiling, args.workspace, [&updater, &writer](const AppendPart& part) {
    if (part.is_first) writer.write(part.append, part.i);
    updater.update(part);
  });
}

// The lookups of a pass of requests. What a lookup reads of the store is loaded in three waits: the ends of the rows;
// the entries of all n-grams; the text before all positions of these entries. Most entries are of another n-gram, which
// this text shows. The scalar unit loads only the blocks of the others, and the text of a draft.
class StoreLookups : public StoreLookupsLayout {
 public:
  __aicore__ inline StoreLookups(AscendC::TPipe& pipe, const StoreProposeParams& p, int64_t per_pass)
      : p_(p),
        row_ends_(pipe, per_pass * kMaxSize),
        entries_(pipe, per_pass * kSizes * kUnitItems),
        texts_(pipe, per_pass * kSizes * kEntryWords * kMaxSize) {}

  // `match_len` returns the length of the own match of a request of the pass.
  template <class MatchLen>
  __aicore__ inline void load(int64_t first, int64_t count, const MatchLen& match_len) {
    for (int64_t j = 0; j < count; ++j) {
      const Query query = queries_[j] = query_of(p_, first + j);
      const int64_t num_tokens = smaller(query.length, kMaxSize);
      if (num_tokens > 0) row_ends_.load(j * kMaxSize, query.end + (-num_tokens), num_tokens);
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      own_matches_[j] = match_len(j);
      const uint64_t seed = seed_of_scope(queries_[j].scope);
      for_each_ngram(row_end(j), queries_[j].length, [&](int64_t level, uint64_t hash) {
        if (!is_looked_up(j, level)) return;
        entries_.load(entry_offset(j, level), entry_of(p_.contents.table, hash, seed, level), kEntryWords);
      });
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t level = 0; level < kSizes; ++level) {
        if (!is_looked_up(j, level)) continue;
        load_text(j, level, kNewest);
        load_text(j, level, kSecond);
      }
    }
    sync_pipes<AscendC::HardEvent::MTE2_S>();
  }

  __aicore__ inline const Query& query(int64_t j) const { return queries_[j]; }

  // The longest trusted n-gram, or else the longest one if the request has no match of its own.
  __aicore__ inline StoreDraft choose_draft(int64_t j) const {
    StoreDraft longest = no_draft();
    for (int64_t level = kSizes - 1; level >= 0; --level) {
      if (!is_looked_up(j, level)) continue;
      StoreDraft draft{size_of_level(level), find_valid_occurrence(j, level, kNewest), no_occurrence()};
      if (draft.newest.row < 0) continue;
      draft.second = find_valid_occurrence(j, level, kSecond);
      if (is_trusted(p_.contents, draft, own_matches_[j])) return draft;
      if (longest.match_len == 0 && own_matches_[j] == 0) longest = draft;
    }
    return longest;
  }

 private:
  __aicore__ static inline int64_t entry_offset(int64_t j, int64_t level) { return (j * kSizes + level) * kUnitItems; }
  __aicore__ static inline int64_t text_offset(int64_t j, int64_t level, int64_t word) {
    return ((j * kSizes + level) * kEntryWords + word) * kMaxSize;
  }
  // The end of the last tokens of the row of request j.
  __aicore__ inline UbWords row_end(int64_t j) const {
    return {row_ends_, j * kMaxSize + smaller(queries_[j].length, kMaxSize)};
  }
  __aicore__ inline bool is_looked_up(int64_t j, int64_t level) const {
    const int64_t n = size_of_level(level);
    return n > own_matches_[j] && n <= queries_[j].length;
  }
  // The tokens before a position that are in its block, at most those of an n-gram of the level.
  __aicore__ static inline int64_t num_text_tokens(int32_t position, int64_t level) {
    return smaller<int64_t>(position % kBlockTokens, size_of_level(level));
  }

  __aicore__ inline void load_text(int64_t j, int64_t level, int64_t word) {
    const int32_t position = entries_.get(entry_offset(j, level) + word);
    if (position <= 0) return;
    const int64_t count = num_text_tokens(position, level);
    const int64_t row = ring_row(p_.contents, position / kBlockTokens);
    texts_.load(text_offset(j, level, word), p_.contents.text[row] + (position % kBlockTokens - count), count);
  }

  __aicore__ inline Occurrence find_valid_occurrence(int64_t j, int64_t level, int64_t word) const {
    const int32_t position = entries_.get(entry_offset(j, level) + word);
    if (position <= 0) return no_occurrence();
    const int64_t n = size_of_level(level), count = num_text_tokens(position, level);
    const UbWords end = row_end(j), text_end{texts_, text_offset(j, level, word) + count};
    for (int64_t t = 0; t < count; ++t) {
      if (text_end[-1 - t] != end[-1 - t]) return no_occurrence();
    }
    const Occurrence found = find_occurrence(p_, queries_[j], position, n);
    if (found.row < 0) return no_occurrence();
    for (int64_t t = count; t < n; ++t) {
      if (ngram_token(p_.contents, found, t) != end[-1 - t]) return no_occurrence();
    }
    return found;
  }

  const StoreProposeParams& p_;
  LocalBuffer<int32_t> row_ends_, entries_, texts_;
  Query queries_[kMaxLookups];
  int64_t own_matches_[kMaxLookups];
};

// The results of a pass of requests. Requests without a draft from the store keep their own.
class StoreDrafts : public StoreDraftsLayout {
 public:
  __aicore__ inline StoreDrafts(AscendC::TPipe& pipe, const StoreProposeParams& p, int64_t per_pass)
      : p_(p),
        draft_token_ids_(pipe, p.draft_token_ids, p.k, per_pass, false),
        num_draft_tokens_(pipe, per_pass),
        match_lens_(pipe, per_pass),
        agreements_(pipe, per_pass) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    num_draft_tokens_.load(0, p_.num_draft_tokens + first, count);
    match_lens_.load(0, p_.match_len + first, count);
  }
  __aicore__ inline int32_t match_len(int64_t j) const { return match_lens_.get(j); }

  __aicore__ inline void set(int64_t j, const Query& query, const StoreDraft& draft) {
    is_replaced_[j] = draft.match_len > 0;
    agreements_.set(j, kOwnDraft);
    if (!is_replaced_[j]) return;
    const Continuation newest = find_continuation(p_.contents, query, draft.newest);
    const int32_t padding = padding_token(p_, query);
    int64_t count = 0;
    for (; count < newest.count && is_valid_token(newest[count], p_.vocab_size); ++count)
      draft_token_ids_.set(j, count, newest[count]);
    for (int64_t t = count; t < p_.k; ++t) draft_token_ids_.set(j, t, padding);
    num_draft_tokens_.set(j, static_cast<int32_t>(count));
    match_lens_.set(j, draft.match_len);
    agreements_.set(j, kSingleOccurrence);
    if (draft.second.row < 0) return;
    const Continuation second = find_continuation(p_.contents, query, draft.second);
    int64_t num_equal = 0;
    while (num_equal < smaller(count, second.count) && newest[num_equal] == second[num_equal]) ++num_equal;
    agreements_.set(j, static_cast<int32_t>(num_equal));
  }

  __aicore__ inline void store(int64_t first, int64_t count) {
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    for (int64_t j = 0; j < count; ++j) {
      if (is_replaced_[j]) draft_token_ids_.store(j, first + j);
    }
    num_draft_tokens_.store(0, p_.num_draft_tokens + first, count);
    match_lens_.store(0, p_.match_len + first, count);
    agreements_.store(0, p_.agreement + first, count);
    sync_pipes<AscendC::HardEvent::MTE3_S>();
  }

 private:
  const StoreProposeParams& p_;
  StagedDraftRows draft_token_ids_;
  LocalBuffer<int32_t> num_draft_tokens_, match_lens_, agreements_;
  bool is_replaced_[kMaxLookups];
};

__aicore__ inline void propose_from_store(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<StoreProposeParams>(args.params);
  const auto core_tiling = read_as<CoreTiling>(args.tiling);
  AscendC::TPipe pipe;
  StoreLookups lookups(pipe, p, core_tiling.per_pass);
  StoreDrafts drafts(pipe, p, core_tiling.per_pass);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    drafts.load(first, count);
    lookups.load(first, count, [&drafts](int64_t j) { return drafts.match_len(j); });
    for (int64_t j = 0; j < count; ++j) drafts.set(j, lookups.query(j), lookups.choose_draft(j));
    drafts.store(first, count);
  }
}

}  // namespace ngram_npu::ascendc

NGRAM_NPU_KERNEL(ngram_npu_store_append, ngram_npu::ascendc::plan_appends)
NGRAM_NPU_KERNEL(ngram_npu_store_append_copy, ngram_npu::ascendc::copy_entries)
NGRAM_NPU_KERNEL(ngram_npu_store_append_write, ngram_npu::ascendc::write_appends)
NGRAM_NPU_KERNEL(ngram_npu_store_propose, ngram_npu::ascendc::propose_from_store)
