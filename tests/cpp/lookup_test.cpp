// The lookup at every instruction set of this machine, each row flush against a guard page, through the C entry point.
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

// Rows that have broken, or could break, a vectorised lookup. Each generator calls visit(tokens, ranges of n).
struct NgramRange {
  int64_t min_n;
  int64_t max_n;
};
using Ranges = std::vector<NgramRange>;

Tokens bits(uint32_t word, int64_t length) {
  Tokens tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(static_cast<int32_t>(word >> i & 1));
  return tokens;
}

void append(Tokens& tokens, const Tokens& more) { tokens.insert(tokens.end(), more.begin(), more.end()); }

// Generates all rows of the tokens 0 and 1 up to a length.
template <class Visit>
void every_binary_row(int64_t max_length, const Visit& visit) {
  const Ranges ranges{{1, 1}, {1, 2}, {2, 2}, {1, 3}, {2, 4}, {3, 3}, {2, 5}, {4, 4}, {1, 8}, {5, 12}, {1, 64}};
  for (int64_t length = 0; length <= max_length; ++length) {
    for (uint32_t word = 0; word < uint32_t{1} << length; ++word) visit(bits(word, length), ranges);
  }
}

// All pairs of a short head and tail, so far apart that the head lies in another vector, block or pass than the tail.
template <class Visit>
void every_head_and_tail(const Visit& visit) {
  const Ranges ranges{{1, 5}, {2, 3}, {3, 64}};
  for (const int64_t gap : {3, 10, 21, 27, 53, 59, 118}) {
    for (uint32_t word = 0; word < uint32_t{1} << 10; ++word) {
      Tokens tokens = bits(word & 31, 5);
      append(tokens, Tokens(static_cast<size_t>(gap), 2));
      append(tokens, bits(word >> 5, 5));
      visit(tokens, ranges);
    }
  }
}

// Lengths around every edge: all of them up to three of the largest blocks (16 lanes x 4), then around pages.
std::vector<int64_t> edge_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t length = 0; length <= 3 * 64 + 3; ++length) lengths.push_back(length);
  for (const int64_t edge : {256, 512, 1024, 2048}) {
    for (int64_t off = -1; off <= 2; ++off) lengths.push_back(edge + off);
  }
  return lengths;
}

// Generates rows with arbitrary 32-bit token ids.
constexpr int32_t kExtremeTokens[] = {-1, 0, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};

template <class Visit>
void rows_of_every_length(const Visit& visit) {
  Ranges ranges;
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 33, 64}) {
    ranges.push_back({n, n});
    if (n > 1) ranges.push_back({1, n});
    if (n > 3) ranges.push_back({n / 2, n});
  }
  RandomChoices random(20240229);
  for (const int64_t length : edge_lengths()) {
    for (const int64_t alphabet : {2, 3, 7}) visit(make_random_row(random, length, alphabet), ranges);
    Tokens tokens = make_random_row(random, length, 4);
    for (int32_t& token : tokens) token = kExtremeTokens[token];
    visit(tokens, {{1, 1}, {1, 4}, {3, 8}});
  }
}

// Periodic rows: matches overlap the suffix, and reach max_n everywhere or just miss it.
template <class Visit>
void periodic_rows(const Visit& visit) {
  RandomChoices random(7);
  for (const int64_t length : edge_lengths()) {
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

// A copy of the suffix near the row's start, among tokens equal to the last one: a descending pass finds a long match
// there, and the tokens before it are too few for a longer one.
template <class Visit>
void long_matches_near_the_start(const Visit& visit) {
  RandomChoices random(11);
  for (int64_t round = 0; round < 3000; ++round) {
    const int64_t suffix_length = 2 + random.below(40);
    Tokens suffix(static_cast<size_t>(suffix_length), 1);
    for (int64_t i = random.below(3); i > 0; --i) suffix[static_cast<size_t>(random.below(suffix_length - 1))] = 0;
    Tokens tokens(static_cast<size_t>(random.below(70)), 1);
    append(tokens, suffix);
    append(tokens, Tokens(static_cast<size_t>(random.below(70)), random.below(2) == 0 ? 1 : 2));
    if (random.below(2) == 0) tokens.push_back(3);
    append(tokens, suffix);
    const int64_t min_n = 1 + random.below(3);
    visit(tokens, {{min_n, min_n + random.below(64 - min_n + 1)}});
  }
}

// Generates rows with exactly one occurrence, at each position.
template <class Visit>
void single_occurrences(const Visit& visit) {
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
void every_row(int64_t max_binary_length, const Visit& visit) {
  every_binary_row(max_binary_length, visit);
  every_head_and_tail(visit);
  rows_of_every_length(visit);
  periodic_rows(visit);
  long_matches_near_the_start(visit);
  single_occurrences(visit);
}

// Calls test->check for each row and range until the first failure: one fault gives one message.
template <class Test>
auto checker(Test* test) {
  return [test](const Tokens& tokens, const Ranges& ranges) {
    for (const NgramRange& n : ranges) {
      if (!testing::Test::HasFailure()) test->check(tokens, n.min_n, n.max_n);
    }
  };
}

// Looks up one row at a time through ngram_propose. The memory is allocated once: the cases are many and short. Copies
// of the last token follow a row that is flush at the start; they must not be read.
class RowLookup {
 public:
  explicit RowLookup(Flush flush) : flush_(flush) {}

  Draft operator()(const Tokens& tokens, const LookupOptions& options) {
    const int64_t length = length_of(tokens);
    // With a flush end the row may start at any multiple of 4 bytes. A row that fills the memory is flush at both ends.
    int32_t* row = flush_ == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
    std::copy(tokens.begin(), tokens.end(), row);
    if (flush_ == Flush::kStart && length > 0) {
      std::fill_n(row + length, std::min<int64_t>(150, memory_.size() - length), tokens.back());
    }
    const auto num_tokens = static_cast<int32_t>(length);
    int32_t* draft = drafts_.data() + (flush_ == Flush::kEnd ? drafts_.size() - options.k : 0);
    NgramProposeParams p{};
    const int64_t capacity = flush_ == Flush::kEnd ? length : memory_.size();
    p.token_ids = {row, 1, capacity, capacity};
    p.num_tokens = &num_tokens;
    p.batch = 1;
    p.lookup = options;
    p.draft_token_ids = {draft, p.lookup.k, 4};
    p.num_draft_tokens = counts_.data();
    p.match_len = counts_.data() + 1;
    EXPECT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
    return {Tokens(draft, draft + options.k), counts_.data()[0], counts_.data()[1]};
  }

 private:
  static constexpr int64_t kLongestRow = 3 * 1024;  // whole pages

  Flush flush_;
  Guarded<int32_t> memory_{kLongestRow, Flush::kEnd};
  Guarded<int32_t> drafts_{kMaxDraftTokens, flush_};
  Guarded<int32_t> counts_{2, flush_};
};

class LookupTest : public InstructionSetTest {
 public:
  // Compares with the definition for both match policies and both edges. Alternates the other options.
  void check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      LookupOptions options{min_n, max_n, kMaxDraftTokens, kNoLimit, match_policy, false, false, nullptr, 0};
      if (++calls_ % 4 == 0) options.k = 1 + calls_ % 7;
      options.overlap = calls_ % 3 == 0;
      const Draft expected = expected_draft(tokens, options);
      for (RowLookup* lookup : {&at_end_, &at_start_}) {
        const Draft got = (*lookup)(tokens, options);
        ASSERT_TRUE(got == expected) << (lookup == &at_end_ ? "end" : "start") << " at a guard, match_policy "
                                     << match_policy << ", n " << min_n << ".." << max_n << ", k " << options.k
                                     << ", overlap " << options.overlap << ", row " << testing::PrintToString(tokens)
                                     << ", expected " << testing::PrintToString(expected.tokens) << ", got "
                                     << testing::PrintToString(got.tokens);
      }
    }
  }

 private:
  RowLookup at_end_{Flush::kEnd};
  RowLookup at_start_{Flush::kStart};
  int64_t calls_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Isa, LookupTest, testing::ValuesIn(instruction_sets()), get_instruction_set_name);

TEST_P(LookupTest, EqualsTheDefinition) { every_row(12, checker(this)); }

// The memory of a row that cannot draft is not read.
TEST_P(LookupTest, RowsThatCannotDraftAreNotRead) {
  GuardedRows<int32_t> rows(5, 4096, Flush::kEnd);
  rows.forbid_reads();
  const int32_t num_tokens[] = {4000, 1, 0, 4097, 4096};
  const int32_t num_sampled[] = {0, 1, 1, 1, 1};
  int32_t drafts[5], num_draft[5], match_len[5];
  NgramProposeParams p{};
  p.token_ids = rows.view<const int32_t>();
  p.num_tokens = num_tokens;
  p.num_sampled = num_sampled;
  p.batch = 5;
  p.lookup = {1, 3, 1, 4096, kLatest, true, false, nullptr, 0};
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
  EXPECT_EQ(Tokens(num_draft, num_draft + 5), Tokens(5, 0));
  EXPECT_EQ(Tokens(drafts, drafts + 5), Tokens(5, -1));
}

// The lookup's logic at vector widths that this machine may not have (NEON's 4 lanes on x86), with vectors written as
// loops. Compares the occurrence itself: over a small alphabet, different occurrences can give equal drafts.
template <int64_t lanes>
struct Emulated {
  static constexpr int64_t kLanes = lanes;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t compare(const int32_t* at, Reg token) {
    uint64_t mask = 0;
    for (int64_t i = 0; i < lanes; ++i) mask |= static_cast<uint64_t>(at[i] == token) << i;
    return mask;
  }
};

template <class Vec>
class LookupLanesTest : public testing::Test {
 public:
  void check(const Tokens& tokens, int64_t min_n, int64_t max_n) {
    const int64_t length = length_of(tokens);
    if (length < 2) return;  // callers pass at least two tokens
    for (const int32_t match_policy : {kEarliest, kLatest}) {
      const Match expected = expected_match(tokens, min_n, max_n, match_policy);
      for (const Flush flush : kFlushes) {
        int32_t* row = flush == Flush::kEnd ? memory_.data() + memory_.size() - length : memory_.data();
        std::copy(tokens.begin(), tokens.end(), row);
        const Match got = cpu::find_match_with<Vec>(row, length, min_n, max_n, match_policy);
        ASSERT_TRUE(got.end == expected.end && got.len == expected.len)
            << Vec::kLanes << " lanes, " << (flush == Flush::kEnd ? "end" : "start") << " at a guard, match_policy "
            << match_policy << ", n " << min_n << ".." << max_n << ", row " << testing::PrintToString(tokens)
            << ", expected end " << expected.end << ", got " << got.end;
      }
    }
  }

 private:
  Guarded<int32_t> memory_{3 * 1024, Flush::kEnd};
};

using Widths = testing::Types<Emulated<1>, Emulated<4>, Emulated<8>, Emulated<16>, Emulated<64>>;
TYPED_TEST_SUITE(LookupLanesTest, Widths);

TYPED_TEST(LookupLanesTest, EqualsTheDefinition) { every_row(11, checker(this)); }

TEST(InstructionSetChoiceTest, AutoIsTheWidestAndUnknownNamesChangeNothing) {
  const std::string widest = ngram_npu_cpu_instruction_set();
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  EXPECT_EQ(widest, avx512 ? "avx512" : __builtin_cpu_supports("avx2") ? "avx2" : "scalar");
#elif defined(__aarch64__)
  EXPECT_EQ(widest, "neon");
#endif
  ASSERT_EQ(ngram_npu_cpu_set_instruction_set("scalar"), kOk);
  for (const char* name : {"", "sse9", "AVX2", "scalar ", static_cast<const char*>(nullptr)}) {
    EXPECT_EQ(ngram_npu_cpu_set_instruction_set(name), kInvalidParams);
    EXPECT_STREQ(ngram_npu_cpu_instruction_set(), "scalar");
  }
  EXPECT_EQ(ngram_npu_cpu_set_instruction_set("auto"), kOk);
  EXPECT_EQ(ngram_npu_cpu_instruction_set(), widest);
}

// The guard pages on which other tests rely. EXPECT_DEATH accepts a signal as well as a sanitizer's report: ASan
// handles SIGSEGV itself and exits.
TEST(GuardPagesDeathTest, AccessOutsideARowFaults) {
  // Re-executes the binary: a fork of a process with threads (a sanitizer's) could hang.
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto read = [](const volatile int32_t* at) { static_cast<void>(*at); };
  for (const Flush flush : kFlushes) {
    const GuardedRows<int32_t> rows(2, 5, flush);
    EXPECT_DEATH(read(flush == Flush::kEnd ? rows[1] + 5 : rows[1] - 1), "");
    rows[0][flush == Flush::kEnd ? -1 : 5] = 0;
    EXPECT_FALSE(rows.is_intact());
  }
  Guarded<int32_t> frozen({1, 2, 3}, Flush::kEnd);
  frozen.forbid_writes();
  EXPECT_DEATH(*const_cast<volatile int32_t*>(frozen.data() + 1) = 5, "");
}

}  // namespace
}  // namespace ngram_npu::test
