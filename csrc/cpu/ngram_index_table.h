// The table of one slot, and the walk that looks up and indexes the n-grams that end at one token (the `end`). The code
// is generic over an instruction set; each isa_<name>.cpp compiles the code once. Everything here has internal linkage,
// because the linker must not merge functions of the same name that were compiled for different instruction sets.
//
// The lazy rule (docs/design/index.md): an n-gram of the indexed row has an entry if and only if n == min_n or its
// suffix of the next shorter length occurs at least twice. The n-grams of one end therefore have entries at levels
// 0 .. m without a gap, and all entries except the last are marked `repeated`. A new end changes only the entry at
// level m and inserts entries at deeper levels, those of longer n-grams.
#pragma once

#include "core/draft_costs.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {
namespace {

using namespace index;

// Isa provides these functions, and the functions of ScalarLanes or faster versions of them:
//   match_lanes(line, expected, mask)   bit i of the result is set if lane i equals `expected` in the bits of `mask`
//   find_empty_lane(line)   the first empty lane of a line that is not full; entries are in the first lanes
//   count_common_suffix8(a, b), count_common_suffix16(a, b)   the number of equal tokens at the end of 8 or 16 tokens

// Returns the entry for the page of depth + 1 after the split of a page of this depth.
inline uint32_t split_entry(uint32_t entry, uint32_t depth) {
  const uint32_t next = next_mask(depth);
  return (entry & ~next) << 1 | (entry & next);
}

// An entry of an n-gram, and the occurrence that the entry records.
struct Hit {
  uint32_t* entry;
  uint32_t word;  // the entry's contents when it was found
  uint32_t mask;  // the bits of `next` in the entry
  uint32_t next;
  uint32_t num_common;  // number of equal tokens, up to max_n, at the end of the occurrence and at `end`
  // Whether the n-gram has occurred more than once.
  bool is_repeated() const { return (word & (mask + 1)) != 0; }
  void set_repeated() const { *entry |= mask + 1; }
  void record(uint32_t position) const { *entry = word + (position - next); }
};

struct ScalarLanes {
  // With kHasGather, gather() loads 16 words at 16 offsets; both are VectorType<16>. Without a gather instruction,
  // single loads are faster.
  static constexpr bool kHasGather = false;
  static void gather(const uint32_t*, const void*, void*) {}

  // Distributes the entries whose home line is this line to the lines `low` and `high` of the two new pages, which are
  // overwritten. Returns the lanes of the other entries.
  static uint32_t split_line(const uint32_t* line, uint32_t home, uint32_t depth, uint32_t* low, uint32_t* high) {
    uint32_t* const new_lines[2] = {low, high};
    uint32_t num_used[2] = {0, 0};
    uint32_t displaced_lanes = 0;
    for (uint32_t lane = 0; lane < kLineWords; ++lane) low[lane] = high[lane] = 0;
    for (uint32_t lane = 0; lane < kLineWords && line[lane] != 0; ++lane) {
      if ((line[lane] >> home_shift(depth)) % kGroupLines != home) {
        displaced_lanes |= 1u << lane;
      } else {
        const uint32_t page = line[lane] >> 31;
        new_lines[page][num_used[page]++] = split_entry(line[lane], depth);
      }
    }
    return displaced_lanes;
  }
};

// Generic vectors of the compiler, which maps them to the instruction set.
template <uint32_t kWidth>
struct VectorType;
template <>
struct VectorType<8> {
  typedef uint32_t Type __attribute__((vector_size(32)));
};
template <>
struct VectorType<16> {
  typedef uint32_t Type __attribute__((vector_size(64)));
};

// Consecutive ends, and for each level the lines of the entries of the n-grams at these ends; level 0 has the shortest
// n-grams. Vector instructions compute the lines before the walk, because they do not depend on the walk.
template <int kRows, uint32_t kWidth>
struct EndsBatch {
  using Vector = typename VectorType<kWidth>::Type;
  uint32_t first;
  uint32_t size;
  uint32_t version;  // version of the table when the lines were located; a split makes the lines stale
  Vector key[kRows];
  Vector line[kRows];        // index of the home line among the lines of all pages
  Vector head[kRows];        // head that the entry has in its page
  Vector probe_mask[kRows];  // bits of the entry to compare
  Vector next_mask[kRows];   // bits of `next` in the entry
  Vector min_next_mask;      // the minimum of next_mask over all levels
};

inline bool is_full(const uint32_t* line) { return line[kLineWords - 1] != 0; }

// Inserts an entry into the first line of its group that is not full, starting at `line_id`. Returns false if all are
// full.
template <class Isa>
bool insert_entry(uint32_t* page, uint32_t line_id, uint32_t entry) {
  for (uint32_t i = 0; i < kGroupLines; ++i) {
    uint32_t* line = page + line_id * kLineWords;
    if (!is_full(line)) {
      line[Isa::find_empty_lane(line)] = entry;
      return true;
    }
    line_id = (line_id & ~(kGroupLines - 1)) | ((line_id + 1) & (kGroupLines - 1));
  }
  return false;
}

// Distributes the entries of page `low` to the pages `low` and `high`.
template <class Isa>
void split_page(uint32_t* low, uint32_t* high, uint32_t depth) {
  if (low == high) return;  // only with a corrupt directory
  alignas(64) uint32_t old_page[kPageWords];
  __builtin_memcpy(old_page, low, sizeof old_page);
  uint32_t displaced_lanes[kPageLines];
  uint32_t all_displaced = 0;
  for (uint32_t line = 0; line < kPageLines; ++line) {
    const uint32_t offset = line * kLineWords;
    displaced_lanes[line] = Isa::split_line(old_page + offset, line % kGroupLines, depth, low + offset, high + offset);
    all_displaced |= displaced_lanes[line];
  }
  if (all_displaced == 0) return;
  // Entries outside their home line are inserted last, so that home lines are filled with their own entries first.
  for (uint32_t line = 0; line < kPageLines; ++line) {
    for (uint32_t lanes = displaced_lanes[line]; lanes != 0; lanes &= lanes - 1) {
      const uint32_t entry = old_page[line * kLineWords + static_cast<uint32_t>(__builtin_ctz(lanes))];
      const uint32_t home = (line & ~(kGroupLines - 1)) | ((entry >> home_shift(depth)) % kGroupLines);
      insert_entry<Isa>(entry >> 31 != 0 ? high : low, home, split_entry(entry, depth));
    }
  }
}

// kLevels: number of n-gram lengths if known at compile time, otherwise 0. kWidth: number of ends per batch. kLadder: n
// is 1, 2, 4, 8 or 16. Functions that run for most tokens are NGRAM_FN, because the compiler would not inline functions
// of this size.
template <class Isa, int kLevels, uint32_t kWidth, bool kLadder>
class SlotTable {
 public:
  SlotTable(const Arena& arena, const IndexOptions& options, uint32_t slot_id, const int32_t* tokens)
      : arena_(arena),
        pages_(arena.pages),
        slot_(arena.slot(slot_id)),
        tokens_(tokens),
        slot_id_(slot_id),
        min_n_(static_cast<uint32_t>(options.min_n)),
        max_n_(static_cast<uint32_t>(options.max_n)) {
    load_directory();
  }

  // Whether no memory was left for a page, so that the table is incomplete.
  bool has_failed() const { return has_failed_; }

  using Vector = typename VectorType<kWidth>::Type;

  // Number of tokens before an occurrence that are compared at once.
  static constexpr uint32_t kVerifiedTokens = kLadder ? 16 : 8;

  static constexpr int kRows = kLevels != 0 ? kLevels : kMaxLevels;
  using Batch = EndsBatch<kRows, kWidth>;

  // Computes the keys of the n-grams at the ends first .. first + size - 1. Words after the row's tokens, up to
  // `readable_words`, may be read but are not used.
  void make_keys(uint32_t first, uint32_t size, uint32_t readable_words, Batch* batch) const {
    batch->first = first;
    batch->size = size;
    const uint32_t* newest_token = reinterpret_cast<const uint32_t*>(tokens_) + first;
    uint32_t token_copy[kMaxNgram + kWidth];
    if (first + 1 < max_n_ || readable_words - first < kWidth) {
      // Near the beginning and the end of the row's memory, a vector would extend beyond the memory.
      const uint32_t num_before = smaller(first, max_n_ - 1);
      for (uint32_t i = num_before; i < max_n_ - 1; ++i) token_copy[max_n_ - 2 - i] = 0;
      for (uint32_t i = 0; i < num_before + size; ++i)
        token_copy[max_n_ - 1 - num_before + i] = newest_token[static_cast<int64_t>(i) - num_before];
      for (uint32_t i = size; i < kWidth; ++i) token_copy[max_n_ - 1 + i] = 0;
      newest_token = token_copy + max_n_ - 1;
    }
    Vector hashes{};
    for (uint32_t j = 0; j < min_n_; ++j) add_products(newest_token - j, kFactors.values[j], &hashes);
    for (int level = 0; level < num_levels(); ++level) {
      index::make_keys(hashes, static_cast<uint32_t>(level), &batch->key[level]);
      if (level + 1 == num_levels()) break;
      for (uint32_t n = ngram_length(level); n < ngram_length(level + 1); ++n)
        add_products(newest_token - n, kFactors.values[n], &hashes);
    }
  }

  void prefetch_directory(const Batch& batch) const {
    if (dir_depth_ <= kRootDepth) return;
    for (int level = 0; level < num_levels(); ++level) {
      for (uint32_t i = 0; i < batch.size; ++i)
        __builtin_prefetch(directory_at(dir_index(batch.key[level][i], dir_depth_), dir_depth_));
    }
  }

  // Computes the batch's lines and masks from the directory, and prefetches the lines.
  void locate_lines(Batch* batch) const {
    const uint32_t last_page = arena_.num_pages - 1;
    const uint32_t size = batch->size;
    const uint32_t dir_depth = dir_depth_;
    const uint32_t* const directory = directory_;
    Vector min_next_mask = ~Vector{};
    for (int level = 0; level < num_levels(); ++level) {
      const Vector key = batch->key[level];
      Vector entry{};
      if (Isa::kHasGather && kWidth == 16 && dir_depth <= kPageEntriesLog2) {
        const Vector offsets = (key >> (31 - dir_depth)) >> 1;
        Isa::gather(directory, &offsets, &entry);
      } else {
        for (uint32_t i = 0; i < size; ++i) {
          const uint32_t offset = dir_index(key[i], dir_depth);
          entry[i] = dir_depth <= kPageEntriesLog2 ? directory[offset] : *directory_at(offset, dir_depth);
        }
      }
      const Vector depth = entry & 15u;
      const Vector page = entry >> 4;
      const Vector line = (page < last_page ? page : last_page + Vector{}) * kPageLines + (key & (kPageLines - 1));
      batch->line[level] = line;
      batch->head[level] = (key & kHeadBits) << depth;
      batch->next_mask[level] = (((1u << kNextBits) + Vector{}) << depth) - 1;
      min_next_mask &= batch->next_mask[level];
      if constexpr (NGRAM_INDEX_FINGERPRINT_BITS >= kPrefixBits) {
        batch->probe_mask[level] = (kHeadBits + Vector{}) << depth;
      } else {
        for (uint32_t i = 0; i < kWidth; ++i) batch->probe_mask[level][i] = probe_mask(depth[i]);
      }
      for (uint32_t i = 0; i < size && level < num_prefetched_levels(); ++i) __builtin_prefetch(line_at(line[i]));
    }
    batch->min_next_mask = min_next_mask;
    batch->version = version_;
  }

  // Allocates the table's first page if the slot has none. Returns false if no memory is left.
  bool ensure_table() {
    if (slot_[kSlotPages] > 0) return true;
    const uint32_t page = allocate_page(arena_, slot_id_);
    if (page == kNoPage) return false;
    uint32_t* words = arena_.page(page);
    for (int64_t i = 0; i < kPageWords; ++i) words[i] = 0;
    slot_[kSlotPages] = 1;
    slot_[kSlotDepth] = 0;
    slot_[kSlotRoot] = make_dir_entry(page, 0);
    load_directory();
    return true;
  }

  // The position recorded at the deepest level with a likely entry; 0 if there is no such entry. The result is only a
  // hint for prefetching, because the entry is not verified.
  uint32_t likely_position(const Batch& batch, uint32_t i) const {
    const LikelyEntry likely = find_likely_entry(batch, i);
    if (likely.level < 0) return 0;
    return line_at(batch.line[likely.level][i])[likely.lane] & batch.next_mask[likely.level][i];
  }
  // The position recorded by a likely entry at this level.
  uint32_t likely_position(const Batch& batch, uint32_t i, int level) const {
    const uint32_t* line = line_at(batch.line[level][i]);
    const uint32_t lanes = Isa::match_lanes(line, batch.head[level][i], batch.probe_mask[level][i]);
    return lanes == 0 ? 0 : line[__builtin_ctz(lanes)] & batch.next_mask[level][i];
  }

  // Number of levels with lines that locate_lines() prefetches. On text, 3 of 4 ends have no ladder entry at deeper
  // levels.
  int num_prefetched_levels() const { return kLadder ? 3 : num_levels(); }
  void prefetch_remaining_levels(const Batch& batch, uint32_t i) const {
    for (int level = num_prefetched_levels(); level < num_levels(); ++level)
      __builtin_prefetch(line_at(batch.line[level][i]));
  }

  int num_levels() const { return kLevels != 0 ? kLevels : static_cast<int>(max_n_ - min_n_) + 1; }

  // Looks up and indexes the n-grams at end i of the batch. Returns the earliest occurrence of the longest n-gram that
  // has occurred before.
  Match walk_earliest(Batch* batch, uint32_t i) {
    const uint32_t end = batch->first + i;
    if (batch->version != version_) locate_lines(batch);
    Hit hit{};
    // The deepest entry records the occurrence to return. An entry at the top level does not change.
    const int level = find_deepest_entry(*batch, i, &hit);
    const uint32_t n = min_n_ + static_cast<uint32_t>(level);
    if (level >= 0) {
      if (n == max_n_) return {static_cast<int64_t>(hit.next) - 1, n};
      if (!hit.is_repeated()) {
        hit.set_repeated();
        return insert_second_occurrence(batch, i, level, hit, hit.next);
      }
    }
    // The n-gram of the deepest entry has occurred before, and the n-gram that is one token longer has not.
    if (n + 1 <= end + 1) insert(batch, i, level + 1, end + 1, false);
    return level < 0 ? Match{-1, 0} : Match{static_cast<int64_t>(hit.next) - 1, n};
  }

  // Looks up and indexes the n-grams at end i of the batch. Returns the latest occurrence of the longest n-gram that
  // has occurred before.
  Match walk_latest(Batch* batch, uint32_t i) {
    const uint32_t end = batch->first + i;
    if (batch->version != version_) locate_lines(batch);
    if (end + 1 < max_n_ || end + 1 > batch->min_next_mask[i]) return walk_latest_and_split(batch, i);
    Match match{-1, 0};
#pragma GCC unroll 8
    for (int level = 0; level < kRows; ++level) {
      if (kLevels == 0 && level == num_levels()) break;
      Hit hit;
      if (!find_entry(*batch, i, level, end, &hit)) {
        insert(batch, i, level, end + 1, false);
        return match;
      }
      const bool occurred_once = !hit.is_repeated();
      hit.record(end + 1);
      if (occurred_once && level + 1 < num_levels()) {
        hit.set_repeated();
        return insert_second_occurrence(batch, i, level, hit, end + 1);
      }
      match = {static_cast<int64_t>(hit.next) - 1, hit.num_common};
    }
    return match;
  }

  // walk_latest() for ends near the beginning of a row, which have no long n-grams, and for ends that an entry can
  // record only after its page was split.
  __attribute__((noinline)) Match walk_latest_and_split(Batch* batch, uint32_t i) {
    const uint32_t end = batch->first + i;
    const int max_levels = num_levels_at(end);
    Hit hits[kMaxLevels];
    int num_found;
    bool occurred_once;
    do {
      occurred_once = false;
      for (num_found = 0;
           num_found < max_levels && !occurred_once && find_entry(*batch, i, num_found, end, &hits[num_found]);
           ++num_found) {
        occurred_once = !hits[num_found].is_repeated();
      }
    } while (split_page_if_needed(batch, i, hits, num_found));
    if (has_failed_) return {-1, 0};
    for (int level = 0; level < num_found; ++level) hits[level].record(end + 1);
    const int level = num_found - 1;
    if (occurred_once && level + 1 < num_levels()) {
      hits[level].set_repeated();
      return insert_second_occurrence(batch, i, level, hits[level], end + 1);
    }
    if (num_found < max_levels) insert(batch, i, num_found, end + 1, false);
    if (level < 0) return {-1, 0};
    return {static_cast<int64_t>(hits[level].next) - 1, hits[level].num_common};
  }

 private:
  // The home line of one n-gram's entry, and what to compare in it.
  struct Probe {
    uint32_t* line;
    uint32_t head;
    uint32_t probe_mask;
    uint32_t next_mask;
  };

  // The deepest level with a likely entry in the home lines, and the entry's lane; level -1 if there is none.
  struct LikelyEntry {
    int level;
    uint32_t lane;
  };

  uint32_t* line_at(uint32_t number) const { return pages_ + static_cast<size_t>(number) * kLineWords; }

  Probe make_probe(Key key) const {
    const uint32_t entry = *directory_at(dir_index(key, dir_depth_), dir_depth_);
    const uint32_t depth = entry & 15u;
    return {arena_.page(entry >> 4) + line_of(key) * kLineWords, entry_head(key, depth), probe_mask(depth),
            next_mask(depth)};
  }

  uint32_t ngram_length(int level) const {
    return kLadder ? ladder_ngram_length(static_cast<uint32_t>(level)) : min_n_ + static_cast<uint32_t>(level);
  }

  // Number of levels with an n-gram at `end`. At the beginning of a row, the row has no n-grams of the longer lengths.
  int num_levels_at(uint32_t end) const {
    if (end + 1 >= max_n_) return num_levels();
    if (kLadder) return 32 - __builtin_clz(end + 1);
    return end + 1 < min_n_ ? 0 : static_cast<int>(end + 2 - min_n_);
  }

  uint32_t token(uint32_t position) const { return static_cast<uint32_t>(tokens_[position]); }

  uint32_t hash_ngram(uint32_t end, uint32_t n) const {
    uint32_t hash = 0;
    for (uint32_t j = 0; j < n; ++j) hash += token(end - j) * kFactors.values[j];
    return hash;
  }

  static void add_products(const uint32_t* tokens, uint32_t factor, Vector* hashes) {
    Vector vector;
    __builtin_memcpy(&vector, tokens, sizeof vector);
    *hashes += vector * factor;
  }

  // Caches the directory's address and depth, which change only when the directory is doubled.
  void load_directory() {
    dir_depth_ = smaller(slot_[kSlotDepth], kMaxDepth);
    directory_ = dir_depth_ <= kRootDepth ? slot_ + kSlotRoot : arena_.page(slot_[kSlotRoot]);
  }

  uint32_t* directory_at(uint32_t i, uint32_t depth) const {
    if (depth <= kRootDepth) return slot_ + kSlotRoot + i;
    return arena_.page(slot_[kSlotRoot + (i >> kPageEntriesLog2)]) + (i & ((1u << kPageEntriesLog2) - 1));
  }

  // Finds the deepest level with a likely entry without a branch per level, because this level is not predictable.
  LikelyEntry find_likely_entry(const Batch& batch, uint32_t i) const {
    if (kLevels != 0 && kLevels * kLineWords <= 64) {  // one word has a bit for each lane of each level
      uint64_t lanes = 0;
      for (int level = 0; level < num_levels(); ++level) {
        const uint32_t* line = line_at(batch.line[level][i]);
        lanes |= static_cast<uint64_t>(Isa::match_lanes(line, batch.head[level][i], batch.probe_mask[level][i]))
                 << (level * 16);
      }
      if (lanes == 0) return {-1, 0};
      const uint32_t last_lane = 63 - static_cast<uint32_t>(__builtin_clzll(lanes));
      return {static_cast<int>(last_lane / kLineWords), last_lane % kLineWords};
    }
    for (int level = num_levels() - 1; level >= 0; --level) {
      const uint32_t lanes =
          Isa::match_lanes(line_at(batch.line[level][i]), batch.head[level][i], batch.probe_mask[level][i]);
      if (lanes != 0) return {level, static_cast<uint32_t>(__builtin_ctz(lanes))};
    }
    return {-1, 0};
  }

  // Finds the deepest entry of end i. Returns its level; -1 if there is none.
  int find_deepest_entry(const Batch& batch, uint32_t i, Hit* hit) const {
    const uint32_t end = batch.first + i;
    int level = num_levels_at(end) - 1;
    if (level + 1 == num_levels()) {
      const LikelyEntry likely = find_likely_entry(batch, i);
      const int next_level = likely.level + 1;
      // If the home line is full, the entry of the next level may be in another line of the group. If there is no entry
      // at the next level, there is no deeper entry.
      const bool is_line_full = next_level < num_levels() && is_full(line_at(batch.line[next_level][i]));
      if (likely.level < 0) {
        if (!is_line_full) return -1;
      } else {
        uint32_t* entry = line_at(batch.line[likely.level][i]) + likely.lane;
        const uint32_t n = min_n_ + static_cast<uint32_t>(likely.level);
        if (verify_entry(entry, batch.next_mask[likely.level][i], end, n, hit) &&
            (!is_line_full || !hit->is_repeated()))
          return likely.level;
      }
    }
    // This search is needed near the beginning of a row, after a false fingerprint match, and if a line is full.
    while (level >= 0 && !find_entry(batch, i, level, end, hit)) --level;
    return level;
  }

  // Number of equal tokens, up to max_n, that end at positions a and b, where a < b.
  uint32_t count_common_suffix(uint32_t a, uint32_t b) const {
    if (kLadder && a >= 15) return Isa::count_common_suffix16(tokens_ + a - 15, tokens_ + b - 15);
    if (max_n_ <= 8 && a >= 7) return smaller(Isa::count_common_suffix8(tokens_ + a - 7, tokens_ + b - 7), max_n_);
    const uint32_t limit = smaller(max_n_, a + 1);
    uint32_t num_common = 0;
    while (num_common < limit && tokens_[a - num_common] == tokens_[b - num_common]) ++num_common;
    return num_common;
  }

  // Whether the n tokens before the position that an entry records equal the n tokens that end at `end`. Writes the
  // hit.
  bool verify_entry(uint32_t* entry, uint32_t mask, uint32_t end, uint32_t n, Hit* hit) const {
    const uint32_t word = *entry, next = word & mask;
    // A corrupt entry must not cause reads beyond the row. An empty lane has next 0, and next - 1 wraps around.
    if (next - 1 >= end) return false;
    *hit = {entry, word, mask, next, count_common_suffix(next - 1, end)};
    return hit->num_common >= n;
  }

  // verify_entry() with one comparison. With a ladder, this function also returns false if fewer than kVerifiedTokens
  // tokens end at one of the two positions.
  NGRAM_FN bool verify_entry_at_once(uint32_t* entry, uint32_t mask, uint32_t end, uint32_t n, Hit* hit) const {
    if (!kLadder) return verify_entry(entry, mask, end, n, hit);
    const uint32_t word = *entry, next = word & mask;
    if (end < 15 || next - 16 >= end - 15) return false;
    *hit = {entry, word, mask, next, Isa::count_common_suffix16(tokens_ + next - 16, tokens_ + end - 15)};
    return hit->num_common >= n;
  }

  // Finds the entry of the n-gram at end i and this level. This function handles two situations: the first likely entry
  // of the home line is the n-gram's, or the home line has no likely entry and is not full.
  NGRAM_FN bool find_entry(const Batch& batch, uint32_t i, int level, uint32_t end, Hit* hit) const {
    uint32_t* const line = line_at(batch.line[level][i]);
    const uint32_t lanes = Isa::match_lanes(line, batch.head[level][i], batch.probe_mask[level][i]);
    if (lanes == 0) {
      if (!is_full(line)) return false;
    } else {
      uint32_t* const entry = line + __builtin_ctz(lanes);
      if (verify_entry_at_once(entry, batch.next_mask[level][i], end, ngram_length(level), hit)) return true;
    }
    Hit hit_in_group;  // a separate variable, so that the caller's hit can stay in registers
    if (!find_entry_in_group(batch.key[level][i], lanes, level, end, &hit_in_group)) return false;
    *hit = hit_in_group;
    return true;
  }

  // Searches these lanes of the home line, then the other lines of the group.
  __attribute__((noinline)) bool find_entry_in_group(Key key, uint32_t lanes, int level, uint32_t end, Hit* hit) const {
    const Probe probe = make_probe(key);
    uint32_t* const group = probe.line - line_of(key) % kGroupLines * kLineWords;
    for (uint32_t i = 0; i < kGroupLines; ++i) {
      uint32_t* line = group + (line_of(key) + i) % kGroupLines * kLineWords;
      if (i > 0) lanes = Isa::match_lanes(line, probe.head, probe.probe_mask);
      for (; lanes != 0; lanes &= lanes - 1) {
        if (verify_entry(line + __builtin_ctz(lanes), probe.next_mask, end, ngram_length(level), hit)) return true;
      }
      if (!is_full(line)) return false;
    }
    return false;
  }

  // Inserts the entries that the lazy rule requires when an n-gram occurs for the second time, at end i: the entries of
  // longer n-grams, up to the first length at which the two occurrences differ. The entries of n-grams that both
  // occurrences have record `position`.
  NGRAM_FN Match insert_second_occurrence(Batch* batch, uint32_t i, int level, const Hit& hit, uint32_t position) {
    const uint32_t end = batch->first + i;
    uint32_t n = ngram_length(++level);
    for (; n <= hit.num_common; n = ngram_length(++level)) insert(batch, i, level, position, true);
    if (n <= max_n_) {
      if (n <= end + 1) insert(batch, i, level, end + 1, false);
      if (n <= hit.next) {
        insert(make_key(hash_ngram(hit.next - 1, n), static_cast<uint32_t>(level)), hit.next, false);
      }
    }
    return {static_cast<int64_t>(hit.next) - 1, hit.num_common};
  }

  // Inserts the entry of the n-gram at end i and this level, which has no entry yet.
  NGRAM_FN void insert(Batch* batch, uint32_t i, int level, uint32_t next, bool is_repeated) {
    if (batch->version != version_) locate_lines(batch);
    uint32_t* line = line_at(batch->line[level][i]);
    const uint32_t mask = batch->next_mask[level][i];
    if (next <= mask && !is_full(line)) {
      line[Isa::find_empty_lane(line)] = batch->head[level][i] | (is_repeated ? mask + 1 : 0) | next;
    } else {
      insert(batch->key[level][i], next, is_repeated);
    }
  }

  NGRAM_FN void insert(Key key, uint32_t next, bool is_repeated) {
    while (!has_failed_) {
      const Probe probe = make_probe(key);
      const uint32_t entry = probe.head | (is_repeated ? probe.next_mask + 1 : 0) | next;
      if (next <= probe.next_mask && insert_entry<Isa>(probe.line - line_of(key) * kLineWords, line_of(key), entry))
        return;
      split_page_of(key);
    }
  }

  // Splits the page of a hit if its entry cannot record the new end. Returns true if entries moved.
  bool split_page_if_needed(Batch* batch, uint32_t i, const Hit* hits, int num_found) {
    for (int level = 0; level < num_found; ++level) {
      if (batch->first + i + 1 > hits[level].mask) {
        split_page_of(batch->key[level][i]);
        locate_lines(batch);
        return !has_failed_;
      }
    }
    return false;
  }

  // Splits the page of a key into two pages. Sets has_failed_ if no memory is left or the page is too deep to split.
  void split_page_of(Key key) {
    const uint32_t old_entry = *directory_at(dir_index(key, dir_depth_), dir_depth_);
    const uint32_t depth = old_entry & 15u;
    if (depth >= kMaxDepth) slot_[kSlotDisabled] = kTableTooLarge;
    if (depth >= kMaxDepth || depth > dir_depth_ || (depth == dir_depth_ && !double_directory())) {
      has_failed_ = true;
      return;
    }
    const uint32_t new_page = allocate_page(arena_, slot_id_);
    if (new_page == kNoPage) {
      has_failed_ = true;
      return;
    }
    ++version_;
    ++slot_[kSlotPages];
    add_to_statistic(arena_, kStatSplits);
    split_page<Isa>(arena_.page(old_entry >> 4), arena_.page(new_page), depth);
    const uint32_t entries_per_page = 1u << (dir_depth_ - depth - 1);
    const uint32_t first_entry = dir_index(key, dir_depth_) & ~(2 * entries_per_page - 1);
    for (uint32_t j = 0; j < entries_per_page; ++j) {
      *directory_at(first_entry + j, dir_depth_) = make_dir_entry(old_entry >> 4, depth + 1);
      *directory_at(first_entry + entries_per_page + j, dir_depth_) = make_dir_entry(new_page, depth + 1);
    }
  }

  // Doubles the directory. Returns false if no memory is left.
  bool double_directory() {
    const uint32_t old_depth = dir_depth_;
    if (old_depth >= kMaxDepth) return false;
    const uint32_t depth = old_depth + 1;
    if (depth > kRootDepth && depth <= kPageEntriesLog2 + 4) {
      // The directory moves from the slot to its first page, or gets twice as many pages.
      uint32_t root[kLineWords] = {};
      const uint32_t pages = depth <= kPageEntriesLog2 ? 1 : 1u << (depth - kPageEntriesLog2);
      const uint32_t old_pages = old_depth <= kRootDepth ? 0 : old_depth <= kPageEntriesLog2 ? 1 : pages / 2;
      for (uint32_t j = old_pages; j < pages; ++j) {
        root[j] = allocate_page(arena_, slot_id_);
        if (root[j] == kNoPage) {
          while (j-- > old_pages) release_page(arena_, slot_id_, root[j]);
          return false;
        }
      }
      slot_[kSlotPages] += pages - old_pages;
      if (old_pages == 0) {
        uint32_t* first = arena_.page(root[0]);
        for (uint32_t j = 0; j < kLineWords; ++j) first[j] = slot_[kSlotRoot + j];
      }
      for (uint32_t j = old_pages; j < pages; ++j) slot_[kSlotRoot + j] = root[j];
    }
    for (uint32_t j = 1u << old_depth; j-- > 0;) {
      const uint32_t entry = *directory_at(j, depth);
      *directory_at(2 * j, depth) = entry;
      *directory_at(2 * j + 1, depth) = entry;
    }
    slot_[kSlotDepth] = depth;
    load_directory();
    return true;
  }

  const Arena& arena_;
  uint32_t* const pages_;
  uint32_t* const slot_;
  const int32_t* const tokens_;
  const uint32_t slot_id_;
  const uint32_t min_n_;
  const uint32_t max_n_;
  uint32_t* directory_;  // the first directory entry; a directory of more than one page is not contiguous
  uint32_t dir_depth_;
  uint32_t version_ = 0;  // incremented by every split
  bool has_failed_ = false;
};

}  // namespace
}  // namespace ngram_npu::cpu
