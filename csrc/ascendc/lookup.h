// The lookup of ngram_propose and ngram_step_, in one launch or two. docs/design/kernels.md gives the reasons.
//
// Vector instructions cannot compare tokens at an offset. One token of the row's suffix is therefore compared with all
// tokens of a tile, which gives one bit per position, and the bits are shifted: position i can only be the end of n
// equal tokens if t[i - j] equals the suffix's token at depth j (0: the newest) for all j < n. The first comparison,
// with the newest token, reads the whole tile, and most tiles then have no end left. Otherwise the scalar unit counts
// the equal tokens at the end that the match policy prefers. If there are n, only longer matches are of interest, so
// the ends are compared at depth n next, and only in the part of the tile that has ends.
#pragma once

#include "ascendc/device.h"
#include "core/lookup_rules.h"

namespace ngram_npu::ascendc {

// A row for the lookup: the row's tokens in memory, followed by the sampled tokens, which are not in the row yet.
struct UpdatedRow {
  Gm<const int32_t> tokens;
  int64_t num_in_memory;
  Gm<const int32_t> sampled_tokens;
  int64_t length;  // 0 if there is nothing to look up

  __aicore__ inline int32_t operator[](int64_t i) const {
    return i < num_in_memory ? tokens[i] : sampled_tokens[i - num_in_memory];
  }
};

// Whether match `a` is better than match `b`. For matches of equal length, the order of the ends is that of the starts.
__aicore__ inline bool is_better(const Match& a, const Match& b, int32_t match_policy) {
  return a.len != b.len ? a.len > b.len : a.len > 0 && (match_policy == kLatest ? a.end > b.end : a.end < b.end);
}

// Tokens [base, base + count) of a row. The first kHalo tokens are loaded only for matches that end after these.
struct Tile {
  UpdatedRow row;
  int64_t item;   // index of the work item; -1: there are no more tiles
  int64_t base;   // position of the tile's first token
  int64_t count;  // 0 if the item has no end positions
  bool is_last_of_item;
};

// Returns the row to look up for batch position i; each operator defines this function.
template <class Params>
__aicore__ inline UpdatedRow updated_row(const Params& p, int64_t i);

// The sequence of the tiles of all work items of a core, so that the next tiles can be loaded while a tile is searched.
template <class Params>
class Tiles {
 public:
  __aicore__ inline Tiles(const Params& params, const LookupTiling& tiling)
      : p_(params),
        tiling_(tiling),
        is_descending_(params.lookup.match_policy == kLatest),
        pass_begin_(first_item(tiling.items)),
        item_(pass_begin_ - 1) {}

  __aicore__ inline Tile next() {
    if (remaining_tiles_ <= 0 && !enter_next_item()) return {row_, -1, 0, 0, true};
    if (remaining_tiles_ <= 0) return {row_, item_, 0, 0, true};
    --remaining_tiles_;
    const int64_t begin =
        begin_ + (is_descending_ ? remaining_tiles_ : num_tiles_ - 1 - remaining_tiles_) * ends_per_tile_;
    const int64_t base = larger<int64_t>(begin - kHalo, 0);
    return {row_, item_, base, smaller(begin + ends_per_tile_, end_) - base, remaining_tiles_ == 0};
  }

  // Skips the remaining tiles of this work item.
  __aicore__ inline void skip_remaining_tiles(int64_t item) {
    if (item == item_) remaining_tiles_ = 0;
  }

 private:
  // Returns the size of a part if num_ends positions are divided into num_parts parts, rounded up to the alignment.
  __aicore__ static inline int64_t compute_part_size(int64_t num_ends, int64_t num_parts) {
    return ((num_ends + num_parts - 1) / num_parts + kTileAlignTokens - 1) / kTileAlignTokens * kTileAlignTokens;
  }

  __aicore__ inline bool enter_next_item() {
    const int64_t items = p_.batch * tiling_.spans;
    if (pass_begin_ >= items || ++item_ >= items) return false;
    if (item_ == pass_begin_ + tiling_.items.per_pass) {
      item_ = pass_begin_ += pass_stride(tiling_.items);
      if (item_ >= items) return false;
    }
    const int64_t i = item_ / tiling_.spans;
    row_ = updated_row(p_, i);
    // The row's last token is not an end, because only the suffix itself ends there. Spans begin kHalo before the first
    // end, so that tiles begin at multiples of kTileAlignTokens. The order of the spans is rotated by i, so that the
    // first spans of short rows go to different cores.
    const int64_t ends = larger<int64_t>(row_.length - 1, 0);
    const int64_t span = larger(kMinSpan, compute_part_size(ends + kHalo, tiling_.spans));
    begin_ = (item_ + i) % tiling_.spans * span - kHalo;
    end_ = smaller(ends, begin_ + span);
    // Tiles have equal sizes, because a small last tile would not hide the wait for the next tile.
    const int64_t max_size = (tiling_.tile_tokens - kHalo) / kTileAlignTokens * kTileAlignTokens;
    const int64_t size = ends > 0 ? end_ - begin_ : 0;
    num_tiles_ = remaining_tiles_ = size > 0 ? (size + max_size - 1) / max_size : 0;
    ends_per_tile_ = compute_part_size(size, larger<int64_t>(num_tiles_, 1));
    if (num_tiles_ > 0) num_tiles_ = remaining_tiles_ = (size + ends_per_tile_ - 1) / ends_per_tile_;
    return true;
  }

  const Params& p_;
  const LookupTiling& tiling_;
  const bool is_descending_;  // the better ends come first, so that the first match of max_n tokens ends the search
  UpdatedRow row_{};
  int64_t pass_begin_;  // first item of the pass
  int64_t item_;
  // The end positions [begin_, end_) of the item, its tiles, and the number of remaining tiles.
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t num_tiles_ = 0;
  int64_t ends_per_tile_ = 0;
  int64_t remaining_tiles_ = 0;
};

// Loads tiles into a ring of buffers and searches them.
class Searcher : public SearcherLayout {
 public:
  __aicore__ inline Searcher(AscendC::TPipe& pipe, int64_t tile_tokens, const LookupOptions& options)
      : options_(options),
        num_words_(static_cast<int32_t>(tile_tokens / kWordPositions)),
        ends_(pipe, round_up(num_words_, kFlagGroup)),
        marks_(pipe, kBlockWords + num_words_),
        shifted_marks_(pipe, num_words_),
        carry_(pipe, num_words_),
        word_offsets_(pipe, num_words_),
        zero_flags_(pipe, round_up(num_words_, kFlagGroup) / kFlagGroup) {
    pipe.InitBuffer(tiles_, kTileBuffers, static_cast<uint32_t>(tile_tokens * int64_t{sizeof(int32_t)}));
  }

  // Computes constants for the searches. The caller calls this function while the first loads run.
  __aicore__ inline void compute_constants() {
    const auto offsets = word_offsets_.tensor().ReinterpretCast<int32_t>();
    AscendC::CreateVecIndex(offsets, 0, static_cast<uint32_t>(num_words_));
    AscendC::Muls(offsets, offsets, kWordBytes, num_words_);
    AscendC::Duplicate(marks_.tensor(), 0u, kBlockWords);  // no token of the row is before its first tile
    // find_zero_words() reads whole groups, also words that no search computes.
    AscendC::Duplicate(ends_.tensor(), 0u, static_cast<int32_t>(round_up(num_words_, kFlagGroup)));
  }

  __aicore__ inline void load(const Tile& tile) {
    if (tile.count == 0) return;
    auto tokens = tiles_.AllocTensor<int32_t>();
    const int64_t count = count_in_memory(tile);
    if (count > 0) {
      AscendC::GlobalTensor<int32_t> global;
      global.SetGlobalBuffer((Gm<int32_t>)(tile.row.tokens + tile.base), static_cast<uint64_t>(count));
      AscendC::DataCopyPad(tokens, global, make_copy_params<int32_t>(count), AscendC::DataCopyPadExtParams<int32_t>());
    }
    tiles_.EnQue(tokens);
  }

  // Drops the oldest loaded tile without a search.
  __aicore__ inline void drop(const Tile& tile) {
    if (tile.count == 0) return;
    auto tokens = tiles_.DeQue<int32_t>();
    tiles_.FreeTensor(tokens);
  }

  // Returns the best match of more than min_len tokens in the oldest loaded tile. A match that ends in the halo may be
  // reported too short.
  __aicore__ inline Match search(const Tile& tile, int64_t min_len) {
    if (tile.count == 0) return {-1, 0};
    const int64_t max_n = smaller(options_.max_n, tile.row.length - 1);
    if (tile.item != suffix_item_) read_suffix(tile, max_n);
    auto tokens = tiles_.DeQue<int32_t>();
    fill_tail(tile, tokens);
    Words words{0, round_up(tile.count, kTileUnit) / kWordPositions};  // contain all ends
    Match best{-1, larger(min_len, options_.min_n - 1)};
    int64_t depth = 0;
    while (best.len < max_n) {
      keep_ends(tokens, depth, words);
      find_zero_words(words);
      sync_pipes<AscendC::HardEvent::V_S>();
      words = exclude_zero_words(words);
      const bool has_ends = words.begin < words.end;
      if (has_ends) {
        // Every end with a longer match than `best` is left, so the preferred end is the first of its length.
        const int64_t end = find_best_end(words);
        depth = count_equal_tokens(tokens, end, max_n);
        if (depth > best.len) best = {tile.base + end, depth};
      }
      sync_pipes<AscendC::HardEvent::S_V>();
      if (!has_ends) break;
    }
    tiles_.FreeTensor(tokens);
    return best.end < 0 ? Match{-1, 0} : best;
  }

 private:
  static constexpr int32_t kWordBytes = 4;

  struct Words {
    int64_t begin;
    int64_t end;
  };

  __aicore__ static inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
  __aicore__ static inline int64_t count_in_memory(const Tile& tile) {
    return smaller(larger<int64_t>(tile.row.num_in_memory - tile.base, 0), tile.count);
  }
  // Reads the whole suffix while the item's first tile is loaded, because these reads may have to wait for memory, too.
  __aicore__ inline void read_suffix(const Tile& tile, int64_t max_n) {
    for (int64_t n = 1; n <= max_n; ++n) suffix_[n - 1] = tile.row[tile.row.length - n];
    suffix_item_ = tile.item;
  }
  // Fills a tile after the tokens from memory: first the sampled tokens, then, up to the last token that vector
  // instructions read, a token that cannot end a match.
  __aicore__ inline void fill_tail(const Tile& tile, const AscendC::LocalTensor<int32_t>& tokens) {
    const int64_t num_loaded = count_in_memory(tile);
    const auto first = static_cast<int32_t>(round_up(num_loaded, kBlockWords));
    const auto num_filled = static_cast<int32_t>(round_up(tile.count, kTileUnit)) - first;
    if (num_loaded == tile.count && num_loaded == first && num_filled == 0) return;
    const int32_t filler_token = ~suffix_[0];
    if (num_filled > 0) AscendC::Duplicate(tokens[first], filler_token, num_filled);
    if (num_loaded == tile.count && num_loaded == first) return;
    sync_pipes<AscendC::HardEvent::V_S>();
    for (int64_t i = num_loaded; i < larger<int64_t>(tile.count, first); ++i) {
      tokens.SetValue(static_cast<uint32_t>(i), i < tile.count ? tile.row[tile.base + i] : filler_token);
    }
    sync_pipes<AscendC::HardEvent::S_V>();
  }

  // Keeps the ends in `words` that have the suffix's token `depth` positions before them. Depth 0 comes first.
  __aicore__ inline void keep_ends(const AscendC::LocalTensor<int32_t>& tokens, int64_t depth, const Words& words) {
    const int64_t begin = words.begin / kBlockWords * kBlockWords;
    const int64_t end = round_up(words.end, kBlockWords);
    const auto count = static_cast<int32_t>(end - begin);
    const auto ends = ends_.tensor()[static_cast<uint32_t>(begin)];
    if (depth == 0) {
      compare(ends, tokens, suffix_[0], begin, end);
      return;
    }
    // Marks the token, also in the block before, and shifts the marks by `depth` positions. Bits that leave a word are
    // carried to the next word.
    const int64_t first = larger<int64_t>(begin - kBlockWords, 0);
    const auto& marks = marks_.tensor();
    compare(marks[static_cast<uint32_t>(kBlockWords + first)], tokens, suffix_[depth], first, end);
    const int64_t word_shift = depth / kWordPositions;
    const auto bit_shift = static_cast<uint32_t>(depth % kWordPositions);
    const auto source = static_cast<uint32_t>(kBlockWords + begin - word_shift);  // in marks_
    const auto& carry = carry_.tensor();
    const auto& shifted = shifted_marks_.tensor();
    AscendC::Gather(carry, marks, word_offsets_.tensor(), (source - 1) * kWordBytes, static_cast<uint32_t>(count));
    AscendC::ShiftRight(carry, carry, kWordPositions - bit_shift, count);
    if (word_shift == 0) {
      AscendC::ShiftLeft(shifted, marks[source], bit_shift, count);
    } else {  // marks[source] is not aligned to 32 bytes
      AscendC::Gather(shifted, marks, word_offsets_.tensor(), source * kWordBytes, static_cast<uint32_t>(count));
      AscendC::ShiftLeft(shifted, shifted, bit_shift, count);
    }
    // And() and Or() support only 16-bit integers.
    const auto shifted_halves = shifted.ReinterpretCast<uint16_t>();
    const auto ends_halves = ends.ReinterpretCast<uint16_t>();
    AscendC::Or(shifted_halves, shifted_halves, carry.ReinterpretCast<uint16_t>(), 2 * count);
    AscendC::And(ends_halves, ends_halves, shifted_halves, 2 * count);
  }

  // Compares the positions of words [begin, end) with a token.
  __aicore__ inline void compare(const AscendC::LocalTensor<uint32_t>& bits,
                                 const AscendC::LocalTensor<int32_t>& tokens, int32_t token, int64_t begin,
                                 int64_t end) {
    AscendC::CompareScalar(bits.ReinterpretCast<uint8_t>(), tokens[static_cast<uint32_t>(begin * kWordPositions)],
                           token, AscendC::CMPMODE::EQ, static_cast<uint32_t>((end - begin) * kWordPositions));
  }

  // Computes one bit per word of ends_, in groups: 1 if the word is 0.
  __aicore__ inline void find_zero_words(const Words& words) {
    const int64_t first = words.begin / kFlagGroup * kFlagGroup;
    AscendC::CompareScalar(zero_flags_.tensor().ReinterpretCast<uint8_t>(),
                           ends_.tensor()[static_cast<uint32_t>(first)].ReinterpretCast<int32_t>(), 0,
                           AscendC::CMPMODE::EQ, static_cast<uint32_t>(round_up(words.end, kFlagGroup) - first));
  }

  // Returns the range from the first to the last of `words` that is not 0, after find_zero_words(); an empty range if
  // all are 0.
  __aicore__ inline Words exclude_zero_words(const Words& words) const {
    Words found{words.end, words.end};
    const int64_t first = words.begin / kFlagGroup * kFlagGroup;
    for (int64_t group = first; group < words.end; group += kFlagGroup) {
      uint64_t nonzero = ~zero_flags_.get((group - first) / kFlagGroup);
      // Words outside of `words` have bits from earlier comparisons.
      if (group < words.begin) nonzero &= ~uint64_t{0} << (words.begin - group);
      if (group + kFlagGroup > words.end) nonzero &= ~uint64_t{0} >> (group + kFlagGroup - words.end);
      if (nonzero == 0) continue;
      if (found.begin == words.end) found.begin = group + AscendC::ScalarGetSFFValue<1>(nonzero);
      found.end = group + kFlagGroup - AscendC::ScalarCountLeadingZero(nonzero);
    }
    return found.begin == words.end ? Words{0, 0} : found;
  }

  // Returns the position in the tile of the first or the last end, by the match policy. The first and the last word of
  // `words` are not 0.
  __aicore__ inline int64_t find_best_end(const Words& words) const {
    if (options_.match_policy == kLatest) {
      const int64_t word = words.end - 1;
      return word * kWordPositions + 63 - AscendC::ScalarCountLeadingZero(uint64_t{ends_.get(word)});
    }
    return words.begin * kWordPositions + AscendC::ScalarGetSFFValue<1>(uint64_t{ends_.get(words.begin)});
  }

  // Returns how many tokens of the tile up to `end` equal the suffix, at most max_n. The newest token is equal.
  __aicore__ inline int64_t count_equal_tokens(const AscendC::LocalTensor<int32_t>& tokens, int64_t end,
                                               int64_t max_n) const {
    int64_t count = 1;
    while (count < max_n && count <= end && tokens.GetValue(static_cast<uint32_t>(end - count)) == suffix_[count])
      ++count;
    return count;
  }

  const LookupOptions options_;
  const int32_t num_words_;
  int32_t suffix_[kMaxNgram];  // last tokens of the searched row, the newest first
  int64_t suffix_item_ = -1;   // the item of this row
  AscendC::TQue<AscendC::TPosition::VECIN, kTileBuffers> tiles_;
  LocalBuffer<uint32_t> ends_;   // one bit per position of the tile
  LocalBuffer<uint32_t> marks_;  // the same; begins with a block of zeros
  LocalBuffer<uint32_t> shifted_marks_, carry_, word_offsets_;
  LocalBuffer<uint64_t> zero_flags_;  // one bit per word, 1 if the word is 0
};

// Searches the items of this core, and calls handler.handle_match(item, best_match) for each.
template <class Params, class MatchHandler>
__aicore__ inline void search_items(AscendC::TPipe& pipe, const Params& p, const LookupTiling& tiling,
                                    MatchHandler& handler) {
  Searcher searcher(pipe, tiling.tile_tokens, p.lookup);
  Tiles<Params> tiles(p, tiling);
  Match best_match{-1, 0};
  int64_t finished_item = -1;  // an item whose search is complete; some of its tiles may still be loading
  Tile queue[kTileBuffers];
  for (int64_t t = 0; t < kTileBuffers - 1; ++t) searcher.load(queue[t] = tiles.next());
  searcher.compute_constants();
  for (int64_t t = 0; queue[t % kTileBuffers].item >= 0; ++t) {
    searcher.load(queue[(t + kTileBuffers - 1) % kTileBuffers] = tiles.next());
    const Tile& tile = queue[t % kTileBuffers];
    if (tile.item == finished_item) {
      searcher.drop(tile);
      continue;
    }
    const Match match = searcher.search(tile, best_match.len);
    if (match.len > 0) best_match = match;
    if (best_match.len == p.lookup.max_n) {
      tiles.skip_remaining_tiles(finished_item = tile.item);
    } else if (!tile.is_last_of_item) {
      continue;
    }
    handler.handle_match(tile.item, best_match);
    best_match = {-1, 0};
  }
}

// For the first of two launches. Writes the best match of each work item to the workspace.
class MatchWriter : public MatchWriterLayout {
 public:
  __aicore__ inline MatchWriter(AscendC::TPipe& pipe, uint64_t workspace)
      : match_(pipe, kMatchInts), matches_(Gm<int32_t>(workspace)) {}

  __aicore__ inline void handle_match(int64_t item, const Match& best_match) {
    sync_pipes<AscendC::HardEvent::MTE3_S>();
    match_.set(0, static_cast<int32_t>(best_match.len));
    match_.set(1, static_cast<int32_t>(best_match.end));
    for (int64_t j = 2; j < kMatchInts; ++j) match_.set(j, 0);
    sync_pipes<AscendC::HardEvent::S_MTE3>();
    match_.store(0, matches_ + item * kMatchInts, kMatchInts);
  }

 private:
  LocalBuffer<int32_t> match_;
  const Gm<int32_t> matches_;
};

template <class Params>
__aicore__ inline void search_into_workspace(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<Params>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  AscendC::TPipe pipe;
  MatchWriter writer(pipe, args.workspace);
  search_items(pipe, p, tiling, writer);
}

// Drafts from the best matches of a pass of requests.
class Drafter : public DrafterLayout {
 public:
  template <class Params>
  __aicore__ inline Drafter(AscendC::TPipe& pipe, int64_t per_pass, const Params& p)
      : options_(p.lookup),
        draft_token_ids_(pipe, p.draft_token_ids, p.lookup.k, per_pass, true),
        num_draft_tokens_(pipe, per_pass),
        match_lens_(pipe, per_pass) {}

  // Drafts for request j of the pass; `padding_token` is for output positions that are not filled.
  template <class GetBestMatch>
  __aicore__ inline void draft(int64_t j, const UpdatedRow& row, const GetBestMatch& get_best_match,
                               int32_t padding_token) {
    Match match = get_best_match(j, row);
    // Drops a match that is too short, or beyond the end of a row that has changed since the search.
    if (match.len < options_.min_n || match.end + 1 >= row.length) match = {-1, 0};
    const DraftLengths lengths = draft_lengths(row, match, row.length, options_);
    for (int64_t d = 0; d < options_.k; ++d) {
      const int32_t token = d < lengths.num_filled ? row[draft_read_position(match.end, row.length, d)] : padding_token;
      draft_token_ids_.set(j, d, token);
    }
    num_draft_tokens_.set(j, static_cast<int32_t>(lengths.num_drafted));
    match_lens_.set(j, reported_match_len(match, lengths.num_drafted));
  }

  template <class Params>
  __aicore__ inline void store(const Params& p, int64_t first, int64_t count) {
    draft_token_ids_.store_all(first, count);
    num_draft_tokens_.store(0, p.num_draft_tokens + first, count);
    match_lens_.store(0, p.match_len + first, count);
  }

 private:
  const LookupOptions options_;
  StagedDraftRows draft_token_ids_;
  LocalBuffer<int32_t> num_draft_tokens_, match_lens_;
};

// For the second of two launches. Reads the best match of each span, and returns the best match of a row.
class SpanMatches : public SpanMatchesLayout {
 public:
  __aicore__ inline SpanMatches(AscendC::TPipe& pipe, const LookupTiling& tiling, int32_t match_policy)
      : match_policy_(match_policy),
        match_ints_(tiling.spans * kMatchInts),
        matches_(pipe, tiling.requests.per_pass * match_ints_) {}

  __aicore__ inline void load(uint64_t workspace, int64_t first, int64_t count) {
    sync_pipes<AscendC::HardEvent::S_MTE2>();
    matches_.load(0, Gm<const int32_t>(workspace) + first * match_ints_, count * match_ints_);
    load_event_ = GetTPipePtr()->AllocEventID<AscendC::HardEvent::MTE2_S>();
    AscendC::SetFlag<AscendC::HardEvent::MTE2_S>(load_event_);
  }
  __aicore__ inline void wait() const {
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(load_event_);
    GetTPipePtr()->ReleaseEventID<AscendC::HardEvent::MTE2_S>(load_event_);
  }

  // The best match of request j of the pass.
  __aicore__ inline Match operator()(int64_t j, const UpdatedRow& row) const {
    Match match{-1, 0};
    for (int64_t offset = j * match_ints_; offset < (j + 1) * match_ints_; offset += kMatchInts) {
      const Match candidate{matches_.get(offset + 1), matches_.get(offset)};
      if (candidate.end + 1 >= row.length) continue;  // the row has changed since the search
      if (is_better(candidate, match, match_policy_)) match = candidate;
    }
    return match;
  }

 private:
  const int32_t match_policy_;
  const int64_t match_ints_;
  LocalBuffer<int32_t> matches_;
  AscendC::TEventID load_event_ = 0;  // reserved from load() to wait()
};

// Collects the results of a pass of requests. Each operator defines this class, with three functions:
//   prepare(p, i, j)              before the match of request i, the j-th of the pass, is known
//   add(p, i, j, get_best_match)  then; get_best_match(j, row) returns the best match
//   store(p, first, count)        after all requests of the pass
template <class Params>
class Results;

// For a single launch: one core searches a whole row and then drafts.
template <class Params>
class SingleLaunchDrafter {
 public:
  __aicore__ inline SingleLaunchDrafter(const Params& p, const CoreTiling& core_tiling, Results<Params>& results)
      : p_(p), core_tiling_(core_tiling), results_(results), first_(first_item(core_tiling)) {}

  __aicore__ inline void handle_match(int64_t i, const Match& best_match) {
    results_.prepare(p_, i, i - first_);
    results_.add(p_, i, i - first_, [&best_match](int64_t, const UpdatedRow&) { return best_match; });
    const int64_t count = smaller(core_tiling_.per_pass, p_.batch - first_);
    if (i + 1 < first_ + count) return;
    results_.store(p_, first_, count);
    first_ += pass_stride(core_tiling_);
  }

 private:
  const Params& p_;
  const CoreTiling& core_tiling_;
  Results<Params>& results_;
  int64_t first_;
};

template <class Params>
__aicore__ inline void search_and_draft(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<Params>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  AscendC::TPipe pipe;
  Results<Params> results(pipe, tiling.requests.per_pass, p);
  SingleLaunchDrafter<Params> drafter(p, tiling.requests, results);
  search_items(pipe, p, tiling, drafter);
}

template <class Params>
__aicore__ inline void draft_from_workspace(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<Params>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  const CoreTiling& core_tiling = tiling.requests;
  AscendC::TPipe pipe;
  SpanMatches matches(pipe, tiling, p.lookup.match_policy);
  Results<Params> results(pipe, core_tiling.per_pass, p);
  for (int64_t first = first_item(core_tiling); first < p.batch; first += pass_stride(core_tiling)) {
    const int64_t count = smaller(core_tiling.per_pass, p.batch - first);
    matches.load(args.workspace, first, count);
    for (int64_t j = 0; j < count; ++j) results.prepare(p, first + j, j);  // while the matches are loaded
    matches.wait();
    for (int64_t j = 0; j < count; ++j) results.add(p, first + j, j, matches);
    results.store(p, first, count);
  }
}

}  // namespace ngram_npu::ascendc
