// The lookup of ngram_propose and ngram_step_, in two launches. How and why: docs/design/ascendc.md.
//
// Vectors cannot compare tokens at an offset. So each token of the suffix is compared with the tile as it lies, which
// gives a bit per position, and what was found so far moves by one bit:
//   starts_1 = [t[i] == last],   starts_n[i] = starts_(n-1)[i + 1] and [t[i] == the n-th token from the end],
// the positions at which the last n tokens of the row begin. The largest n for which there is any is the best match.
#pragma once

#include "ascendc/device.h"
#include "core/lookup_rules.h"

namespace ngram_npu::ascendc {

// A row as the lookup sees it: what lies in memory, and the sampled tokens that are about to follow it.
struct GrownRow {
  Gm<const int32_t> tokens;
  int64_t written;
  Gm<const int32_t> sampled;
  int64_t length;  // 0 where there is nothing to look up

  __aicore__ inline int32_t operator[](int64_t at) const { return at < written ? tokens[at] : sampled[at - written]; }
};

// Earlier and later are said of the ends; two matches of one length are equally far from their starts.
__aicore__ inline bool better(const Occurrence& a, const Occurrence& b, int32_t match_policy) {
  return a.len != b.len ? a.len > b.len : a.len > 0 && (match_policy == kLatest ? a.end > b.end : a.end < b.end);
}

// Tokens [base, base + count) of a row, of which the kHalo first only begin matches that end in this tile.
struct Tile {
  GrownRow row;
  int64_t item;  // -1: there are no more
  int64_t base;
  int64_t count;  // 0 where the item has no ends
  bool last_of_item;
};

// Each operator's own: the row that batch position i looks up.
template <class Params>
__aicore__ inline GrownRow grown_row(const Params& p, int64_t i);

// The tiles of all items of a core, one after the other, so that the next one can be on its way while one is searched.
template <class Params>
class Tiles {
 public:
  __aicore__ inline Tiles(const Params& params, const LookupTiling& tiling)
      : p_(params), tiling_(tiling), item_(AscendC::GetBlockIdx() - tiling.cores) {}

  __aicore__ inline Tile next() {
    if (end_ >= item_end_ && !enter_next_item()) return {row_, -1, 0, 0, true};
    if (end_ == item_end_) return {row_, item_, end_, 0, true};
    const int64_t base = larger<int64_t>(end_ - kHalo, 0);
    end_ = smaller(end_ + tile_ends_, item_end_);
    return {row_, item_, base, end_ - base, end_ >= item_end_};
  }

 private:
  __aicore__ inline bool enter_next_item() {
    item_ += tiling_.cores;
    if (item_ >= p_.batch * tiling_.spans) return false;
    const int64_t i = item_ / tiling_.spans;
    row_ = grown_row(p_, i);
    // The last token ends only the suffix itself. Turned by i: short rows' first spans go to different cores.
    const int64_t ends = larger<int64_t>(row_.length - 1, 0);
    const int64_t span = larger(kMinSpan, (ends + tiling_.spans - 1) / tiling_.spans);
    end_ = smaller(ends, (item_ + i) % tiling_.spans * span);
    item_end_ = smaller(ends, end_ + span);
    // Equal tiles: a small one at the end would not hide the wait for the next.
    const int64_t most = tiling_.tile_tokens - kHalo;
    const int64_t tiles = larger<int64_t>((item_end_ - end_ + most - 1) / most, 1);
    tile_ends_ = (item_end_ - end_ + tiles - 1) / tiles;
    return true;
  }

  const Params& p_;
  const LookupTiling& tiling_;
  GrownRow row_{};
  int64_t item_;
  int64_t end_ = 0;  // of this item, the first end that no tile has had yet
  int64_t item_end_ = 0;
  int64_t tile_ends_ = 0;
};

// Loads tiles into a few buffers in turn and searches them.
class Searcher {
 public:
  __aicore__ inline Searcher(AscendC::TPipe& pipe, int64_t tile_tokens, const LookupOptions& options)
      : options_(options),
        words_(static_cast<int32_t>(tile_tokens / kWord)),
        starts_{Local<uint32_t>(pipe, words_ + kBlock), Local<uint32_t>(pipe, words_ + kBlock)},
        moved_(pipe, words_),
        carry_(pipe, words_),
        following_(pipe, words_),
        ranks_(pipe, words_),
        flags_(pipe, words_),
        scratch_(pipe, words_),
        best_(pipe, kBlock) {
    pipe.InitBuffer(tiles_, kTileBuffers, static_cast<uint32_t>(tile_tokens * int64_t{sizeof(int32_t)}));
    // Byte offsets of each word, and the words' ranks: the word that wins has the highest.
    const auto offsets = following_.tensor().ReinterpretCast<int32_t>();
    AscendC::CreateVecIndex(offsets, 0, words_);
    AscendC::Muls(offsets, offsets, kWordBytes, words_);
    const auto& ranks = ranks_.tensor();
    AscendC::CreateVecIndex(ranks, 1.0f, words_);
    if (options.match_policy == kEarliest) {
      AscendC::Muls(ranks, ranks, -1.0f, words_);
      AscendC::Adds(ranks, ranks, static_cast<float>(words_ + 1), words_);
    }
  }

  __aicore__ inline void load(const Tile& tile) {
    if (tile.count == 0) return;
    auto tokens = tiles_.AllocTensor<int32_t>();
    const int64_t count = in_memory(tile);
    if (count > 0) {
      AscendC::GlobalTensor<int32_t> global;
      global.SetGlobalBuffer((Gm<int32_t>)(tile.row.tokens + tile.base), static_cast<uint64_t>(count));
      const auto filling = static_cast<uint8_t>(up_to(count, kBlock) - count);
      AscendC::DataCopyPad(tokens, global, one_block<int32_t>(count),
                           AscendC::DataCopyPadExtParams<int32_t>(true, 0, filling, filler(tile)));
    }
    tiles_.EnQue(tokens);
  }

  // The best match in the tile that was loaded longest ago; ends in its halo may come out shorter than they are.
  __aicore__ inline Occurrence search(const Tile& tile) {
    if (tile.count == 0) return {-1, 0};
    auto tokens = tiles_.DeQue<int32_t>();
    complete(tile, tokens);
    const auto words = static_cast<int32_t>(up_to(tile.count, kTileUnit) / kWord);
    int64_t len = 0;
    int64_t winner = -1;
    while (len < options_.max_n) {
      mark_starts(tokens, tile.row[tile.row.length - (len + 1)], len + 1, words);
      const int64_t word = winning_word(starts_[(len + 1) % 2].tensor(), words);
      if (word < 0) break;
      winner = word;
      ++len;
    }
    tiles_.FreeTensor(tokens);
    if (len == 0) return {-1, 0};
    const uint64_t bits = starts_[len % 2].get(winner);
    const int64_t bit = options_.match_policy == kLatest ? 63 - AscendC::ScalarCountLeadingZero(bits)
                                                         : AscendC::ScalarGetSFFValue<1>(bits);
    return {tile.base + winner * kWord + bit + len - 1, len};
  }

 private:
  static constexpr int32_t kWord = 32;  // positions
  static constexpr int32_t kWordBytes = 4;
  static constexpr int32_t kBlock = 8;  // words of 32 bytes

  __aicore__ static inline int64_t up_to(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
  __aicore__ static inline int64_t in_memory(const Tile& tile) {
    return smaller(larger<int64_t>(tile.row.written - tile.base, 0), tile.count);
  }
  // What no match can end with.
  __aicore__ static inline int32_t filler(const Tile& tile) { return ~tile.row[tile.row.length - 1]; }

  // Behind the tokens from memory: fills up what the vectors will read, and puts the sampled tokens in.
  __aicore__ inline void complete(const Tile& tile, const AscendC::LocalTensor<int32_t>& tokens) {
    const int64_t loaded = in_memory(tile);
    const auto first = static_cast<int32_t>(up_to(loaded, kBlock));
    const auto fill = static_cast<int32_t>(up_to(tile.count, kTileUnit)) - first;
    if (fill > 0) AscendC::Duplicate(tokens[first], filler(tile), fill);
    if (loaded == tile.count) return;
    order<AscendC::HardEvent::V_S>();
    for (int64_t i = loaded; i < tile.count; ++i) {
      tokens.SetValue(static_cast<uint32_t>(i), tile.row[tile.base + i]);
    }
    order<AscendC::HardEvent::S_V>();
  }

  // starts_n from starts_(n-1), its token being the n-th from the row's end. They take turns in two buffers.
  __aicore__ inline void mark_starts(const AscendC::LocalTensor<int32_t>& tokens, int32_t token, int64_t n,
                                     int32_t words) {
    const auto& starts = starts_[n % 2].tensor();
    AscendC::CompareScalar(starts.ReinterpretCast<uint8_t>(), tokens, token, AscendC::CMPMODE::EQ, words * kWord);
    AscendC::Duplicate(starts[words], 0u, kBlock);  // what follows the last word
    if (n == 1) return;
    // One position down: within each word, and the first bit of the following word over into its last.
    const auto& before = starts_[(n - 1) % 2].tensor();
    const auto& moved = moved_.tensor();
    const auto& carry = carry_.tensor();
    AscendC::Gather(carry, before, following_.tensor(), kWordBytes, words);
    AscendC::ShiftLeft(carry, carry, 31u, words);
    AscendC::ShiftRight(moved, before, 1u, words);
    // And, Or know 16-bit integers alone.
    const auto halves = moved.ReinterpretCast<uint16_t>();
    const auto starts_halves = starts.ReinterpretCast<uint16_t>();
    AscendC::Or(halves, halves, carry.ReinterpretCast<uint16_t>(), 2 * words);
    AscendC::And(starts_halves, starts_halves, halves, 2 * words);
  }

  // The first or the last word with a bit set, -1 without. Floats, because integers have no reductions: a word that is
  // not zero counts its rank.
  __aicore__ inline int64_t winning_word(const AscendC::LocalTensor<uint32_t>& starts, int32_t words) {
    const auto& flags = flags_.tensor();
    AscendC::Cast(flags, starts.ReinterpretCast<int32_t>(), AscendC::RoundMode::CAST_NONE, words);
    AscendC::Mul(flags, flags, flags, words);
    AscendC::Mins(flags, flags, 1.0f, words);
    AscendC::Mul(flags, flags, ranks_.tensor(), words);
    AscendC::ReduceMax(best_.tensor(), flags, scratch_.tensor(), words);
    order<AscendC::HardEvent::V_S>();
    const int64_t rank = AscendC::ScalarCast<float, int32_t, AscendC::RoundMode::CAST_RINT>(best_.get(0));
    if (rank == 0) return -1;
    return options_.match_policy == kLatest ? rank - 1 : words_ - rank;
  }

  const LookupOptions options_;
  const int32_t words_;
  AscendC::TQue<AscendC::TPosition::VECIN, kTileBuffers> tiles_;
  Local<uint32_t> starts_[2];
  Local<uint32_t> moved_, carry_, following_;
  Local<float> ranks_, flags_, scratch_, best_;
};

// Launch 1: leaves the best match of each item in its place of the workspace.
template <class Params>
__aicore__ inline void search_items(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<Params>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  const auto matches = Gm<int32_t>(args.workspace);
  AscendC::TPipe pipe;
  Searcher searcher(pipe, tiling.tile_tokens, p.lookup);
  Local<int32_t> match(pipe, kMatchInts);
  for (int64_t j = 0; j < kMatchInts; ++j) match.set(j, 0);
  Tiles<Params> tiles(p, tiling);
  Occurrence best{-1, 0};
  Tile queue[kTileBuffers];
  for (int64_t t = 0; t < kTileBuffers - 1; ++t) searcher.load(queue[t] = tiles.next());
  for (int64_t t = 0; queue[t % kTileBuffers].item >= 0; ++t) {
    searcher.load(queue[(t + kTileBuffers - 1) % kTileBuffers] = tiles.next());
    const Tile& tile = queue[t % kTileBuffers];
    const Occurrence found = searcher.search(tile);
    if (better(found, best, p.lookup.match_policy)) best = found;
    if (!tile.last_of_item) continue;
    order<AscendC::HardEvent::MTE3_S>();
    match.set(0, static_cast<int32_t>(best.len));
    match.set(1, static_cast<int32_t>(best.end));
    order<AscendC::HardEvent::S_MTE3>();
    match.store(0, matches + tile.item * kMatchInts, kMatchInts);
    best = {-1, 0};
  }
}

// Launch 2: from the matches of a pass of requests to their drafts.
class Drafter {
 public:
  __aicore__ inline Drafter(AscendC::TPipe& pipe, const LookupTiling& tiling, const LookupOptions& options)
      : options_(options),
        match_ints_(tiling.spans * kMatchInts),
        matches_(pipe, tiling.requests.per_pass * match_ints_),
        drafts_(pipe, tiling.requests.per_pass * options.k),
        num_drafts_(pipe, tiling.requests.per_pass),
        match_lens_(pipe, tiling.requests.per_pass) {}

  __aicore__ inline void load(uint64_t workspace, int64_t first, int64_t count) {
    order<AscendC::HardEvent::S_MTE2>();
    matches_.load(0, Gm<const int32_t>(workspace) + first * match_ints_, count * match_ints_);
    order<AscendC::HardEvent::MTE2_S>();
  }

  // Request j of the pass; places without a draft get `unused`.
  __aicore__ inline void draft(int64_t j, const GrownRow& row, int32_t unused) {
    Occurrence found{-1, 0};
    for (int64_t at = j * match_ints_; at < (j + 1) * match_ints_; at += kMatchInts) {
      const Occurrence candidate{matches_.get(at + 1), matches_.get(at)};
      if (candidate.end + 1 >= row.length) continue;  // found in a row that another request has changed meanwhile
      if (candidate.len >= options_.min_n && better(candidate, found, options_.match_policy)) found = candidate;
    }
    const int64_t count = num_drafts(found, row.length, options_);
    for (int64_t d = 0; d < options_.k; ++d) {
      drafts_.set(j * options_.k + d, d < count ? row[draft_source(found.end, row.length, d)] : unused);
    }
    num_drafts_.set(j, static_cast<int32_t>(count));
    match_lens_.set(j, reported_len(found, count));
  }

  template <class Params>
  __aicore__ inline void store(const Params& p, int64_t first, int64_t count) {
    drafts_.store(0, p.draft_token_ids + first * options_.k, count * options_.k);
    num_drafts_.store(0, p.num_draft_tokens + first, count);
    match_lens_.store(0, p.match_len + first, count);
  }

 private:
  const LookupOptions options_;
  const int64_t match_ints_;
  Local<int32_t> matches_, drafts_, num_drafts_, match_lens_;
};

}  // namespace ngram_npu::ascendc
