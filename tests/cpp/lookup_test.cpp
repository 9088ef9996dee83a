// Tests the lookup through its C entry point on every instruction set of this machine. Each row is flush against a
// guard page.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cpu/lookup_impl.h"
#include "guard_pages.h"
#include "instruction_sets.h"

namespace ngram_npu::test {
namespace {

struct NgramRange {
  int64_t min_n;
  int64_t max_n;
};
using Ranges = std::vector<NgramRange>;

Tokens make_binary_row(uint32_t word, int64_t length) {
  Tokens tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(word >> i & 1));
  return tokens;
}

void append_tokens(Tokens& tokens, const Tokens& more) { tokens.insert(tokens.end(), more.begin(), more.end()); }

// The following functions generate rows that have exposed, or could expose, faults of a vectorised lookup, and call
// visit(tokens, ranges) for each.

// Generates all rows of the tokens 0 and 1 up to a length.
template <class Visit>
void visit_binary_rows(int64_t max_length, const Visit& visit) {
  const Ranges ranges{{1, 1}, {1, 2}, {2, 2}, {1, 3}, {2, 4}, {3, 3}, {2, 5}, {4, 4}, {1, 8}, {5, 12}, {1, 64}};
  for (int64_t length = 0; length <= max_length; ++length) {
    for (uint32_t word = 0; word < uint32_t{1} << length; ++word) visit(make_binary_row(word, length), ranges);
  }
}

// Generates rows for all pairs of a binary head and a binary tail of five tokens. The tokens between head and tail put
// the head into another vector or block than the tail.
template <class Visit>
void visit_head_and_tail_rows(const Visit& visit) {
  const Ranges ranges{{1, 5}, {2, 3}, {3, 64}};
  for (const int64_t gap : {3, 10, 21, 27, 53, 59, 118}) {
    for (uint32_t word = 0; word < uint32_t{1} << 10; ++word) {
      Tokens tokens = make_binary_row(word & 31, 5);
      append_tokens(tokens, Tokens(static_cast<size_t>(gap), 2));
      append_tokens(tokens, make_binary_row(word >> 5, 5));
      visit(tokens, ranges);
    }
  }
}

// Returns all lengths up to slightly more than three of the largest blocks (4 vectors of 16 lanes), and lengths around
// powers of two from a quarter of a page to two pages.
std::vector<int64_t> list_edge_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t length = 0; length <= 3 * 64 + 3; ++length) lengths.push_back(length);
  for (const int64_t power : {256, 512, 1024, 2048}) {
    for (int64_t offset = -1; offset <= 2; ++offset) lengths.push_back(power + offset);
  }
  return lengths;
}

constexpr int32_t kExtremeTokens[] = {-1, 0, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};

// Generates random rows of every edge length, with few different tokens or with extreme token ids.
template <class Visit>
void visit_rows_of_edge_lengths(const Visit& visit) {
  Ranges ranges;
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 33, 64}) {
    ranges.push_back({n, n});
    if (n > 1) ranges.push_back({1, n});
    if (n > 3) ranges.push_back({n / 2, n});
  }
  RandomChoices random(20240229);
  for (const int64_t length : list_edge_lengths()) {
    for (const int64_t vocab_size : {2, 3, 7}) visit(make_random_row(random, length, vocab_size), ranges);
    Tokens tokens = make_random_row(random, length, 4);
    for (int32_t& token : tokens) token = kExtremeTokens[token];
    visit(tokens, {{1, 1}, {1, 4}, {3, 8}});
  }
}

// Generates periodic rows. Their matches overlap the suffix. They have max_n tokens at nearly every occurrence, or one
// token less.
template <class Visit>
void visit_periodic_rows(const Visit& visit) {
  RandomChoices random(7);
  for (const int64_t length : list_edge_lengths()) {
    for (const int64_t period : {1, 2, 3, 5, 8, 17, 63, 64, 65}) {
      const Tokens unit = make_random_row(random, period, 4);
      Tokens tokens;
      for (int64_t i = 0; i < length; ++i) tokens.push_back(unit[static_cast<size_t>(i % period)]);
      visit(tokens, {{1, 3}, {2, 64}, {33, 33}, {64, 64}});
      if (length == 0) continue;
      tokens[static_cast<size_t>(random.below(length))] = 9;
      visit(tokens, {{1, 64}});
    }
  }
}

// Generates rows with a copy of the suffix near the row's start, among tokens equal to the last one. A search in
// descending order finds a long match there; too few tokens precede that match for a longer one.
template <class Visit>
void visit_rows_with_long_match_near_start(const Visit& visit) {
  RandomChoices random(11);
  for (int64_t round = 0; round < 3000; ++round) {
    const int64_t suffix_length = 2 + random.below(40);
    Tokens suffix(static_cast<size_t>(suffix_length), 1);
    for (int64_t i = random.below(3); i > 0; --i) suffix[static_cast<size_t>(random.below(suffix_length - 1))] = 0;
    Tokens tokens(static_cast<size_t>(random.below(70)), 1);
    append_tokens(tokens, suffix);
    append_tokens(tokens, Tokens(static_cast<size_t>(random.below(70)), random.below(2) == 0 ? 1 : 2));
    if (random.below(2) == 0) tokens.push_back(3);
    append_tokens(tokens, suffix);
    const int64_t min_n = 1 + random.below(3);
    visit(tokens, {{min_n, min_n + random.below(64 - min_n + 1)}});
  }
}

// Generates rows with exactly one earlier occurrence of the last n tokens, at each position.
template <class Visit>
void visit_rows_with_single_occurrence(const Visit& visit) {
  for (const int64_t length : {20, 33, 34, 66, 131, 197}) {
    for (const int64_t n : {1, 2, 3, 5, 8}) {
      for (int64_t end = n - 1; end < length - n; ++end) {
        Tokens tokens;
        for (int64_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(1000 + i));
        std::copy(tokens.end() - n, tokens.end(), tokens.begin() + end + 1 - n);
        visit(tokens, {{1, 8}, {n, n}, {n + 1, n + 1}});
      }
    }
  }
}

template <class Visit>
void visit_all_test_rows(int64_t max_binary_length, const Visit& visit) {
  visit_binary_rows(max_binary_length, visit);
  visit_head_and_tail_rows(visit);
  visit_rows_of_edge_lengths(visit);
  visit_periodic_rows(visit);
  visit_rows_with_long_match_near_start(visit);
  visit_rows_with_single_occurrence(visit);
}

// Returns a visitor that calls test->check for each row and range until the first failure, so that a fault gives one
// message.
template <class Test>
auto make_checker(Test* test) {
  return [test](const Tokens& tokens, const Ranges& ranges) {
    for (const NgramRange& n : ranges) {
      if (!testing::Test::HasFailure()) test->check(tokens, n.min_n, n.max_n);
    }
  };
}

// Looks up one row at a time through ngram_propose. The memory is allocated once, because the rows are many and short.
// A row that is flush at the start is followed by copies of its last token, which the lookup must not read.
class RowLookup {
 public:
  explicit RowLookup(Flush flush) : flush_(flush) {}

  Draft operator()(const Tokens& tokens, const LookupOptions& options) {
    const int64_t length = length_of(tokens);
    // A row that is flush at the end may start at any multiple of 4 bytes. A row that fills the memory is flush at both
    // ends.
    int32_t* row = flush_ == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
    std::copy(tokens.begin(), tokens.end(), row);
    if (flush_ == Flush::kStart && length > 0) {
      std::fill_n(row + length, std::min<int64_t>(150, memory_.size() - length), tokens.back());
    }
    const auto num_tokens = static_cast<int32_t>(length);
    int32_t* draft = drafts_.data() + (flush_ == Flush::kEnd ? drafts_.size() - options.k : 0);
    NgramProposeParams params{};
    const int64_t capacity = flush_ == Flush::kEnd ? length : memory_.size();
    params.token_ids = {row, 1, capacity, capacity};
    params.num_tokens = &num_tokens;
    params.batch = 1;
    params.lookup = options;
    params.draft_token_ids = {draft, params.lookup.k, 4};
    params.num_draft_tokens = counts_.data();
    params.match_len = counts_.data() + 1;
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&params, nullptr), kOk);
    return {Tokens(draft, draft + options.k), counts_.data()[0], counts_.data()[1]};
  }

 private:
  static constexpr int64_t kLongestRow = 3 * 1024;  // in tokens; a whole number of pages

  Flush flush_;
  Guarded<int32_t> memory_{kLongestRow, Flush::kEnd};
  Guarded<int32_t> drafts_{kMaxDraftTokens, flush_};
  Guarded<int32_t> counts_{2, flush_};
};

class LookupTest : public InstructionSetTest {
 public:
  // Compares the draft with the definition (oracle.h) for both match policies, and with the row at the start and at the
  // end of the guarded memory. Varies k and overlap from call to call.
  void check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      LookupOptions options{min_n, max_n, kMaxDraftTokens, kNoLimit, kAnyToken, match_policy, false, false};
      if (++calls_ % 4 == 0) options.k = 1 + calls_ % 7;
      options.overlap = calls_ % 3 == 0;
      if (calls_ % 5 == 0) options.vocab_size = calls_ % 3;
      const Draft expected = compute_expected_draft(tokens, options);
      for (RowLookup* lookup : {&lookup_at_end_, &lookup_at_start_}) {
        const Draft actual = (*lookup)(tokens, options);
        ASSERT_TRUE(actual == expected) << (lookup == &lookup_at_end_ ? "end" : "start") << " at a guard, match_policy "
                                        << match_policy << ", n " << min_n << ".." << max_n << ", k " << options.k
                                        << ", overlap " << options.overlap << ", vocab_size " << options.vocab_size
                                        << ", row " << testing::PrintToString(tokens) << ", expected "
                                        << testing::PrintToString(expected.tokens) << ", got "
                                        << testing::PrintToString(actual.tokens);
      }
    }
  }

 private:
  RowLookup lookup_at_end_{Flush::kEnd};
  RowLookup lookup_at_start_{Flush::kStart};
  int64_t calls_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Isa, LookupTest, testing::ValuesIn(list_instruction_sets()), get_instruction_set_name);

TEST_P(LookupTest, DraftOfEveryRowEqualsDefinition) { visit_all_test_rows(12, make_checker(this)); }

// A row has no draft if the step sampled no token for the request, or if the row has fewer than two tokens, more tokens
// than its capacity, or at least max_len tokens.
TEST_P(LookupTest, RowsThatCannotDraftAreNotRead) {
  GuardedRows<int32_t> rows(5, 4096, Flush::kEnd);
  rows.forbid_reads();
  const int32_t num_tokens[] = {4000, 1, 0, 4097, 4096};
  const int32_t num_sampled[] = {0, 1, 1, 1, 1};
  int32_t drafts[5], num_draft[5], match_len[5];
  NgramProposeParams params{};
  params.token_ids = rows.view<const int32_t>();
  params.num_tokens = num_tokens;
  params.num_sampled = num_sampled;
  params.batch = 5;
  params.lookup = {1, 3, 1, 4096, kAnyToken, kLatest, true, false};
  params.draft_token_ids = {drafts, params.lookup.k, 4};
  params.num_draft_tokens = num_draft;
  params.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_propose(&params, nullptr), kOk);
  EXPECT_EQ(Tokens(num_draft, num_draft + 5), Tokens(5, 0));
  EXPECT_EQ(Tokens(drafts, drafts + 5), Tokens(5, -1));
}

// A vector of `lanes` tokens, written as loops. With it, the following tests run the lookup's logic at vector widths
// that this machine may not have (NEON's 4 lanes on x86). They compare the occurrence itself, because with few
// different tokens, different occurrences can give equal drafts.
template <int64_t lanes>
struct EmulatedVector {
  static constexpr int64_t kLanes = lanes;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < lanes; ++i) mask |= static_cast<uint64_t>(tokens[i] == token) << i;
    return mask;
  }
};

template <class Vec>
class LookupLanesTest : public testing::Test {
 public:
  void check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    const int64_t length = length_of(tokens);
    if (length < 2) return;  // find_match_with() requires at least two tokens
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      const Match expected = find_expected_match(tokens, min_n, max_n, match_policy);
      for (const Flush flush : kFlushes) {
        int32_t* row = flush == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
        std::copy(tokens.begin(), tokens.end(), row);
        const Match actual = cpu::find_match_with<Vec>(row, length, min_n, max_n, match_policy);
        ASSERT_TRUE(actual.end == expected.end && actual.len == expected.len)
            << Vec::kLanes << " lanes, " << (flush == Flush::kEnd ? "end" : "start") << " at a guard, match_policy "
            << match_policy << ", n " << min_n << ".." << max_n << ", row " << testing::PrintToString(tokens)
            << ", expected end " << expected.end << ", got " << actual.end;
      }
    }
  }

 private:
  Guarded<int32_t> memory_{3 * 1024, Flush::kEnd};
};

using Widths =
    testing::Types<EmulatedVector<1>, EmulatedVector<4>, EmulatedVector<8>, EmulatedVector<16>, EmulatedVector<64>>;
TYPED_TEST_SUITE(LookupLanesTest, Widths);

TYPED_TEST(LookupLanesTest, MatchAtEveryVectorWidthEqualsDefinition) { visit_all_test_rows(11, make_checker(this)); }

TEST(InstructionSetChoiceTest, AutoSelectsWidestInstructionSet) {
  ASSERT_EQ(ngram_npu_cpu_set_instruction_set("scalar"), kOk);
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("auto"), kOk);
  const std::string name = ngram_npu_cpu_instruction_set();
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  EXPECT_EQ(name, avx512 ? "avx512" : __builtin_cpu_supports("avx2") ? "avx2" : "scalar");
#elif defined(__aarch64__)
  EXPECT_EQ(name, "neon");
#endif
}

TEST(InstructionSetChoiceTest, UnknownNameIsRejectedWithoutChange) {
  ASSERT_EQ(ngram_npu_cpu_set_instruction_set("scalar"), kOk);
  for (const char* name : {"", "sse9", "AVX2", "scalar ", static_cast<const char*>(nullptr)}) {
    EXPECT_EQ(ngram_npu_cpu_set_instruction_set(name), kInvalidParams);
    EXPECT_STREQ(ngram_npu_cpu_instruction_set(), "scalar");
  }
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("auto"), kOk);
}

// Tests the guard pages, on which the other tests rely. EXPECT_DEATH accepts a signal as well as a sanitizer's report,
// because ASan handles SIGSEGV itself and exits.
TEST(GuardPagesDeathTest, AccessOutsideARowFaults) {
  // Executes the binary again, because a fork of a process with threads (a sanitizer's) could hang.
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto read = [](const volatile int32_t* token) { static_cast<void>(*token); };
  for (const Flush flush : kFlushes) {
    const GuardedRows<int32_t> rows(2, 5, flush);
    EXPECT_DEATH(read(flush == Flush::kEnd ? rows[1] + 5 : rows[1] - 1), "");
    rows[0][flush == Flush::kEnd ? -1 : 5] = 0;
    EXPECT_FALSE(rows.is_intact());
  }
  Guarded<int32_t> read_only({1, 2, 3}, Flush::kEnd);
  read_only.forbid_writes();
  EXPECT_DEATH(*const_cast<volatile int32_t*>(read_only.data() + 1) = 5, "");
}

}  // namespace
}  // namespace ngram_npu::test
