// Compares the index, allocated between guard pages, with the reference definitions (oracle.h) on every instruction
// set. Built four times: as released, with fingerprints of one bit and of none, so that nearly every probe finds a
// wrong entry first, and with small pages.
#include <gtest/gtest.h>

#include "index_episode.h"
#include "instruction_sets.h"

namespace ngram_npu::test {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kEpisodes = 60;
#else
constexpr int kEpisodes = 200;
#endif

class IndexTest : public InstructionSetTest {
 protected:
  static void run_episodes(bool corrupt) {
    EventCounts event_counts;
    for (uint64_t seed = 1; seed <= kEpisodes; ++seed) {
      RandomChoices choices(seed);
      IndexEpisode episode(choices, kFlushes[seed % 2], corrupt);
      const char* error = episode.run();
      ASSERT_EQ(error, nullptr) << "seed " << seed << ": " << error;
      event_counts += episode.event_counts();
    }
    EXPECT_GT(event_counts["drafts"], 10 * kEpisodes);  // otherwise too few drafts were compared
    if (corrupt) return;
    for (const auto& [name, count] : event_counts) EXPECT_GT(count, 0) << name;
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, IndexTest, testing::ValuesIn(list_instruction_sets()), get_instruction_set_name);

TEST_P(IndexTest, DraftsEqualThoseOfAScan) { run_episodes(false); }

TEST_P(IndexTest, CorruptMemoryCausesNoOutOfBoundsAccess) { run_episodes(true); }

// ngram_index_step_ on one row, for up to two drafts.
struct OneRowStep {
  int32_t length, next, num_sampled, num_draft, match_len, drafts[2];
  NgramIndexStepParams params{};

  template <class Row, class Memory>
  OneRowStep(Row& row, int32_t tokens, Memory& index) : length(tokens) {
    const auto width = static_cast<int64_t>(row.size());
    params.step.token_ids = {row.data(), 1, width, width};
    params.step.num_tokens = &length;
    params.step.batch = 1;
    params.step.advance = true;
    params.step.vocab_size = 1 << 30;
    params.step.lookup = {2, 4, 2, int64_t{1} << 40, kEarliest, false, false, nullptr, 0};
    params.step.next_token_ids = &next;
    params.step.num_sampled = &num_sampled;
    params.step.draft_token_ids = {drafts, params.step.lookup.k, 4};
    params.step.num_draft_tokens = &num_draft;
    params.step.match_len = &match_len;
    params.index = {index.data(), static_cast<int64_t>(index.size()), {}};
    params.catch_up_tokens = -1;
  }

  int32_t run(const int32_t* sampled, int64_t count) {
    params.step.sampled_token_ids = {sampled, 1, count, count};
    return ngram_npu_cpu_ngram_index_step_(&params, nullptr);
  }
};

TEST_P(IndexTest, InvalidHeaderIsIgnoredAndRowIsScanned) {
  const Tokens row = {1, 2, 3, 9, 1, 2, 0, 0};
  for (const Flush flush : kFlushes) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, index::kPageWords}) {
      for (const int32_t fill_value : {0, 1, -1, static_cast<int32_t>(index::kMagic)}) {
        Guarded<int32_t> words(size, flush);
        std::fill_n(words.data(), size, fill_value);
        if (size > 0) words.data()[0] = static_cast<int32_t>(index::kMagic);
        const std::vector<int32_t> before = words.values();
        Guarded<int32_t> tokens(row, flush);
        const int32_t sampled[] = {3, -1};
        OneRowStep step(tokens, 6, words);
        ASSERT_EQ(step.run(sampled, 2), kOk);
        EXPECT_EQ(step.length, 7);
        EXPECT_EQ(step.num_draft, 2);
        EXPECT_EQ(step.match_len, 3);
        EXPECT_EQ(step.drafts[0], 9);
        EXPECT_EQ(words.values(), before);
      }
    }
  }
}

// Returns a row of 80 pairs of tokens. Their keys belong to the same line group of the same page even at the maximum
// depth, and the group cannot hold them all.
Tokens make_crowded_row() {
  constexpr uint32_t kPairs = 80, kPageBits = ~0u << (32 - static_cast<int>(index::kMaxDepth));
  Tokens row;
  index::Key first_key = 0;
  for (int32_t newest = 0; row.size() < 2 * kPairs; ++newest) {
    for (int32_t previous = 0; previous < 4096 && row.size() < 2 * kPairs; ++previous) {
      const uint32_t hash = static_cast<uint32_t>(newest) * index::kFactors.values[0] +
                            static_cast<uint32_t>(previous) * index::kFactors.values[1];
      const index::Key key = index::make_key(hash, 0);
      if (row.empty()) first_key = key;
      const bool is_same_group =
          index::line_of(key) / index::kGroupLines == index::line_of(first_key) / index::kGroupLines;
      if (((key ^ first_key) & kPageBits) == 0 && is_same_group) row.insert(row.end(), {previous, newest});
    }
  }
  return row;
}

TEST_P(IndexTest, SlotWithFullTableStaysDisabledUntilRowShrinks) {
  Tokens row = make_crowded_row();
  const int32_t length = static_cast<int32_t>(row.size());
  row.resize(row.size() + 8);
  Index arena(1, 1000);
  OneRowStep step(row, length, arena);
  for (const size_t position : {0, 1, 2}) {  // the sampled tokens repeat the start of the row
    ASSERT_EQ(step.run(&row[position], 1), kOk);
    EXPECT_EQ(step.num_draft, position == 0 ? 0 : 2);
    if (position > 0) {
      EXPECT_EQ(step.drafts[0], row[position + 1]);
    }
    EXPECT_EQ(arena[index::kStatDisabled], 1);
    EXPECT_EQ(arena[index::kStatScanFull], static_cast<int32_t>(position) + 1);
    EXPECT_EQ(arena[index::kHeaderPagesInUse], 0);
  }
  step.length = 2;  // the index tries a shorter row again, because it may fit
  ASSERT_EQ(step.run(row.data(), 1), kOk);
  EXPECT_EQ(arena[index::kStatIndexed], 1);
}

void reset_first_slot(Index& index) {
  const int64_t slot = 0;
  const NgramIndexResetParams params{index.access({&slot, 8}), 1};
  ngram_npu_cpu_ngram_index_reset_(&params, nullptr);
}

TEST_P(IndexTest, DisabledOrResetSlotFreesAllPages) {
  Tokens row = make_crowded_row();
  int64_t num_tables_too_large = 0;  // the other runs end because the arena is full
  for (int64_t pages = 1; pages <= 32; ++pages) {
    Index arena(1, pages);
    const int32_t* const slot = arena.data() + index::kHeaderWords;
    OneRowStep step(row, 0, arena);
    int32_t depth = 0;
    for (size_t end = 0; end < row.size() && slot[index::kSlotDisabled] == 0; ++end) {
      ASSERT_EQ(step.run(&row[end], 1), kOk);
      if (slot[index::kSlotDepth] == depth) continue;
      depth = slot[index::kSlotDepth];
      Index emptied = arena;  // a copy in which the request ends at this depth
      reset_first_slot(emptied);
      EXPECT_EQ(emptied[index::kHeaderPagesInUse], 0) << pages << " pages, a directory of depth " << depth;
      EXPECT_EQ(emptied.find_fault(), 0);
    }
    EXPECT_NE(slot[index::kSlotDisabled], 0);
    num_tables_too_large += slot[index::kSlotDisabled] == static_cast<int32_t>(index::kTableTooLarge);
    EXPECT_EQ(arena[index::kHeaderPagesInUse], 0) << "an arena of " << pages << " pages, which is too small";
    EXPECT_EQ(arena.find_fault(), 0) << pages << " pages";
  }
  EXPECT_GT(num_tables_too_large, 0);
  EXPECT_LT(num_tables_too_large, 16);
}

// The row has one outcome page more than the slot can list (with small pages: than one page of ids can list), so the
// ids of the outcome pages need one page (with small pages: two pages).
TEST_P(IndexTest, DisabledOrResetSlotFreesAllOutcomePages) {
  constexpr uint32_t kListedPages = NGRAM_INDEX_SMALL_PAGES ? 1u << index::kPageEntriesLog2 : index::kRootOutcomePages;
  Tokens row((size_t{kListedPages} << index::kOutcomePageBits) + 100);
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<int32_t>(i % 7);
  const int32_t size = static_cast<int32_t>(row.size());
  int64_t num_disabled = 0, num_indexed = 0;
  for (int64_t pages = 1; num_indexed < 3; pages += NGRAM_INDEX_SMALL_PAGES && pages < 2 * kListedPages ? 7 : 1) {
    Index arena(1, pages);
    const NgramIndexAppendParams params{
        {row.data(), 1, size, size}, &size, {}, 1, 1, kLadderMaxN, kLatest, true, true, arena.access(), nullptr};
    ASSERT_EQ(ngram_npu_cpu_ngram_index_append_(&params, nullptr), kOk);
    ASSERT_EQ(arena.find_fault(), 0) << pages << " pages";
    const int32_t* const slot = arena.data() + index::kHeaderWords;
    if (slot[index::kSlotDisabled] != 0) {
      EXPECT_EQ(arena[index::kHeaderPagesInUse], 0) << "an arena of " << pages << " pages, which is too small";
      ++num_disabled;
      continue;
    }
    EXPECT_EQ(slot[index::kSlotOutcomePages], static_cast<int32_t>(kListedPages) + 1);
    ++num_indexed;
    reset_first_slot(arena);
    EXPECT_EQ(arena[index::kHeaderPagesInUse], 0) << pages << " pages";
    EXPECT_EQ(arena.find_fault(), 0);
  }
  EXPECT_GT(num_disabled, 16);
}

TEST_P(IndexTest, DisabledSlotIsRebuiltIfAQuarterMorePagesAreFree) {
  constexpr int32_t kPages = 64;
  Tokens row = {1, 2, 3, 1, 2, 0};
  for (const int32_t pages_before : {1, 4, 40}) {
    for (const int32_t extra_pages : {0, 1}) {
      Index arena(1, kPages);
      arena[index::kHeaderPagesInUse] = kPages - (pages_before + pages_before / 4 + 2 + extra_pages);
      arena[index::kHeaderWords + index::kSlotOptions] =
          static_cast<int32_t>(index::pack_options(2, 4, kEarliest, false, false));
      arena[index::kHeaderWords + index::kSlotDisabled] = pages_before;
      OneRowStep step(row, 5, arena);
      ASSERT_EQ(step.run(row.data() + 2, 1), kOk);
      EXPECT_EQ(step.num_draft, 2);
      EXPECT_EQ(arena[index::kStatIndexed], extra_pages) << "the slot had " << pages_before << " pages";
      EXPECT_EQ(arena[index::kStatScanFull], 1 - extra_pages) << "the slot had " << pages_before << " pages";
    }
  }
}

}  // namespace
}  // namespace ngram_npu::test
