// ngram_step_ through the C entry point, at every instruction set and in every layout, against its definition. The
// samples of tests/opspecs have the examples.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "guard_pages.h"
#include "instruction_sets.h"
#include "lookup_cases.h"

namespace ngram_npu::test {
namespace {

// A step's inputs and outputs are placed between guard pages, in every layout; memory that must not be written is
// read-only, and every layout must give the same results.
constexpr int32_t kFiller = 1000003;      // contents of a row after its tokens
constexpr int32_t kGarbage = 0x7B7B7B7B;  // contents of outputs before the call

// Indices as the caller has them: absent, int32 or int64.
struct Indices {
  int32_t bytes = 0;
  std::vector<int64_t> values;

  static Indices of_int32(std::vector<int64_t> v) { return {4, std::move(v)}; }
  static Indices of_int64(std::vector<int64_t> v) { return {8, std::move(v)}; }
};

// Placement of rows: each against a guard at its end or start, or as slices of a larger buffer.
enum class Layout { kFlushEnd, kFlushStart, kSliceEnd, kSliceStart };
constexpr Layout kLayouts[] = {Layout::kFlushEnd, Layout::kFlushStart, Layout::kSliceEnd, Layout::kSliceStart};

Flush flush_of(Layout layout) {
  return layout == Layout::kFlushEnd || layout == Layout::kSliceEnd ? Flush::kEnd : Flush::kStart;
}

struct StepInputs {
  std::vector<Tokens> rows;
  int64_t capacity = 16;
  std::vector<int32_t> num_tokens;  // empty: the rows' sizes
  std::vector<Tokens> sampled;      // all of one width
  std::vector<uint8_t> discard;     // empty: absent
  Indices row_indices;
  bool advance = true;
  int64_t vocab_size = 100;
  LookupOptions lookup{1, 3, 4, kNoLimit, kEarliest, false, false, nullptr, 0};
};

struct StepResult {
  std::vector<Tokens> rows;  // whole rows, after the step
  Tokens num_tokens;
  Tokens next;
  Tokens num_sampled;
  Tokens drafts;  // [B, k]
  Tokens num_draft;
  Tokens match_len;

  bool operator==(const StepResult& o) const {
    return rows == o.rows && num_tokens == o.num_tokens && next == o.next && num_sampled == o.num_sampled &&
           drafts == o.drafts && num_draft == o.num_draft && match_len == o.match_len;
  }
};

// A row of the capacity the inputs have, as results show it.
Tokens filled(Tokens tokens, int64_t capacity) {
  tokens.resize(static_cast<size_t>(capacity), kFiller);
  return tokens;
}

class GuardedIndices {
 public:
  GuardedIndices(const Indices& indices, Flush flush)
      : bytes_(indices.bytes),
        narrow_(indices.bytes == 4 ? std::vector<int32_t>(indices.values.begin(), indices.values.end())
                                   : std::vector<int32_t>{},
                flush),
        wide_(indices.bytes == 8 ? indices.values : std::vector<int64_t>{}, flush) {
    narrow_.freeze();
    wide_.freeze();
  }

  IndexArray get() const {
    if (bytes_ == 0) return {nullptr, 0};
    return {bytes_ == 8 ? static_cast<const void*>(wide_.data()) : narrow_.data(), bytes_};
  }

 private:
  int32_t bytes_;
  Guarded<int32_t> narrow_;
  Guarded<int64_t> wide_;
};

// Rows of equal capacity in one of the layouts; what the given tokens leave of a row is kFiller.
class Rows {
 public:
  Rows(const std::vector<Tokens>& rows, int64_t capacity, Layout layout)
      : sliced_(layout == Layout::kSliceEnd || layout == Layout::kSliceStart),
        count_(static_cast<int64_t>(rows.size())),
        capacity_(capacity),
        guarded_(sliced_ ? 0 : count_, capacity, flush_of(layout)),
        slices_(sliced_ ? count_ : 0, capacity, capacity + 3, flush_of(layout)) {
    for (int64_t r = 0; r < count_; ++r) {
      const Tokens& tokens = rows[static_cast<size_t>(r)];
      std::fill(row(r), row(r) + capacity, kFiller);
      std::copy(tokens.begin(), tokens.end(), row(r));
    }
  }

  template <class View>
  TokenRows<View> view() const {
    return sliced_ ? slices_.view<View>() : guarded_.view<View>();
  }

  std::vector<Tokens> values() const {
    std::vector<Tokens> rows;
    for (int64_t r = 0; r < count_; ++r) rows.emplace_back(row(r), row(r) + capacity_);
    return rows;
  }

  // Slices stay writable: their canaries lie in the same pages.
  void freeze() {
    if (!sliced_) guarded_.freeze();
  }

  bool intact() const { return guarded_.intact() && slices_.intact(); }

 private:
  int32_t* row(int64_t r) const { return sliced_ ? slices_[r] : guarded_[r]; }

  bool sliced_;
  int64_t count_;
  int64_t capacity_;
  GuardedRows<int32_t> guarded_;
  PitchedRows<int32_t> slices_;
};

Guarded<int32_t> output(int64_t size, Layout layout) {
  return {Tokens(static_cast<size_t>(size), kGarbage), flush_of(layout)};
}

std::vector<int32_t> lengths_of(const std::vector<Tokens>& rows, const std::vector<int32_t>& given) {
  std::vector<int32_t> lengths = given;
  if (given.empty()) {
    for (const Tokens& row : rows) lengths.push_back(static_cast<int32_t>(row.size()));
  }
  return lengths;
}

StepResult step(const StepInputs& in, Layout layout) {
  const Flush flush = flush_of(layout);
  const Rows rows(in.rows, in.capacity, layout);
  Guarded<int32_t> num_tokens(lengths_of(in.rows, in.num_tokens), flush);
  if (!in.advance) num_tokens.freeze();
  const int64_t width = in.sampled.empty() ? 1 : length_of(in.sampled.front());
  Rows sampled(in.sampled, width, layout);
  sampled.freeze();
  Guarded<uint8_t> discard(in.discard, flush);
  discard.freeze();
  const GuardedIndices row_indices(in.row_indices, flush);

  NgramStepParams p{};
  p.token_ids = rows.view<int32_t>();
  p.num_tokens = num_tokens.data();
  p.sampled_token_ids = sampled.view<const int32_t>();
  p.discard = in.discard.empty() ? nullptr : discard.data();
  p.row_indices = row_indices.get();
  p.batch = static_cast<int64_t>(in.sampled.size());
  p.advance = in.advance;
  p.vocab_size = in.vocab_size;
  p.lookup = in.lookup;
  const Guarded<int32_t> next = output(p.batch, layout);
  const Guarded<int32_t> num_sampled = output(p.batch, layout);
  const Guarded<int32_t> drafts = output(p.batch * p.lookup.k, layout);
  const Guarded<int32_t> num_draft = output(p.batch, layout);
  const Guarded<int32_t> match_len = output(p.batch, layout);
  p.next_token_ids = next.data();
  p.num_sampled = num_sampled.data();
  p.draft_token_ids = {drafts.data(), p.lookup.k, 4};
  p.num_draft_tokens = num_draft.data();
  p.match_len = match_len.data();

  const std::vector<Tokens> sampled_before = sampled.values();
  EXPECT_EQ(ngram_npu_cpu_ngram_step_(&p, nullptr), kOk);
  EXPECT_EQ(sampled.values(), sampled_before);
  EXPECT_TRUE(rows.intact() && num_tokens.intact() && sampled.intact());
  EXPECT_TRUE(next.intact() && num_sampled.intact() && drafts.intact() && num_draft.intact() && match_len.intact());
  return {rows.values(),   num_tokens.values(), next.values(),     num_sampled.values(),
          drafts.values(), num_draft.values(),  match_len.values()};
}

StepResult step(const StepInputs& in) {
  const StepResult result = step(in, kLayouts[0]);
  for (const Layout layout : kLayouts) {
    EXPECT_TRUE(step(in, layout) == result) << "layout " << static_cast<int>(layout);
  }
  return result;
}

class NgramStepTest : public InstructionSetTest {};
INSTANTIATE_TEST_SUITE_P(Isa, NgramStepTest, testing::ValuesIn(instruction_sets()), name_of_instruction_set);

// Values are unspecified, but memory safety holds. (One thread: with several it would be a race of the caller's.)
TEST_P(NgramStepTest, ARowAskedForTwiceIsMemorySafe) {
  StepInputs in;
  in.rows = {{1, 2, 1, 2}, {3}};
  in.capacity = 6;
  in.sampled = {{1, 2, 1}, {2, 1, 2}, {1, 2, 1}, {1, 1, 1}};
  for (const bool advance : {true, false}) {
    in.advance = advance;
    in.row_indices = Indices::of_int64({0, 0, 0, 0});
    for (const Layout layout : kLayouts) {
      const StepResult got = step(in, layout);
      EXPECT_EQ(got.rows[1], filled({3}, 6));
      EXPECT_GE(got.num_tokens[0], 4);
      EXPECT_LE(got.num_tokens[0], 6);
    }
  }
}

// A tensor without elements may have no memory at all.
TEST_P(NgramStepTest, RowsWithoutCapacity) {
  int32_t num_tokens[] = {0, 0, 1};
  const int32_t sampled[] = {4, -1, 4};
  int32_t next[3], num_sampled[3], drafts[3], num_draft[3], match_len[3];
  NgramStepParams p{};
  p.token_ids = {nullptr, 3, 0, 1};
  p.num_tokens = num_tokens;
  p.sampled_token_ids = {sampled, 3, 1, 1};
  p.batch = 3;
  p.advance = true;
  p.vocab_size = 10;
  p.lookup = {1, 1, 1, kNoLimit, kEarliest, false, false, nullptr, 0};
  p.next_token_ids = next;
  p.num_sampled = num_sampled;
  p.draft_token_ids = {drafts, p.lookup.k, 4};
  p.num_draft_tokens = num_draft;
  p.match_len = match_len;
  ASSERT_EQ(ngram_npu_cpu_ngram_step_(&p, nullptr), kOk);
  EXPECT_EQ(Tokens(num_tokens, num_tokens + 3), (Tokens{0, 0, 1}));
  EXPECT_EQ(Tokens(next, next + 3), (Tokens{4, 0, 0}));
  EXPECT_EQ(Tokens(num_sampled, num_sampled + 3), (Tokens{1, 0, 1}));
  EXPECT_EQ(Tokens(drafts, drafts + 3), (Tokens{-1, -1, -1}));
}

// The definition of ngram_step_, request by request.
StepResult expected_step(const StepInputs& in) {
  StepResult want;
  for (const Tokens& row : in.rows) want.rows.push_back(filled(row, in.capacity));
  want.num_tokens = in.num_tokens;
  for (size_t i = 0; i < in.sampled.size(); ++i) {
    Tokens valid;
    for (const int32_t token : in.sampled[i]) {
      if (token < 0 || token >= in.vocab_size || (!in.discard.empty() && in.discard[i] != 0)) break;
      valid.push_back(token);
    }
    want.num_sampled.push_back(static_cast<int32_t>(valid.size()));
    Draft draft = no_draft(in.lookup.k);
    int32_t next = 0;
    const int64_t index = in.row_indices.bytes > 0 ? in.row_indices.values[i] : static_cast<int64_t>(i);
    const auto r = static_cast<size_t>(index);
    if (index >= 0 && r < in.rows.size() && in.num_tokens[r] >= 0 && in.num_tokens[r] <= in.capacity) {
      Tokens row(want.rows[r].begin(), want.rows[r].begin() + in.num_tokens[r]);
      if (!row.empty()) next = row.back();
      if (!valid.empty()) next = valid.back();
      for (const int32_t token : valid) {
        if (length_of(row) < in.capacity) row.push_back(token);
      }
      std::copy(row.begin(), row.end(), want.rows[r].begin());
      if (in.advance) want.num_tokens[r] = static_cast<int32_t>(row.size());
      if (!valid.empty()) draft = expected_draft(row, in.lookup);
    }
    want.next.push_back(next);
    append(want.drafts, draft.tokens);
    want.num_draft.push_back(draft.count);
    want.match_len.push_back(draft.match_len);
  }
  return want;
}

TEST_P(NgramStepTest, RandomBatches) {
  Random random(99);
  for (int round = 0; round < 120; ++round) {
    StepInputs in;
    const int64_t rows = 1 + random.below(6);
    in.capacity = 1 + random.below(80);
    for (int64_t r = 0; r < rows; ++r) {
      in.rows.push_back(random.row(in.capacity, 3));
      in.num_tokens.push_back(static_cast<int32_t>(random.below(in.capacity + 3) - 1));  // -1 and S+1 now and then
    }
    std::vector<int64_t> order;
    for (int64_t r = 0; r < rows; ++r) order.push_back(random.below(8) == 0 ? rows + r : r);
    for (int64_t r = rows - 1; r > 0; --r) {
      std::swap(order[static_cast<size_t>(r)], order[static_cast<size_t>(random.below(r + 1))]);
    }
    if (const int64_t kind = random.below(3); kind > 0) {
      in.row_indices = kind == 1 ? Indices::of_int32(order) : Indices::of_int64(order);
    }
    const int64_t width = 1 + random.below(9);
    for (int64_t i = 0; i < rows; ++i) {
      Tokens sampled = random.row(width, 3);
      for (int64_t j = random.below(width + 1); j < width; ++j) sampled[static_cast<size_t>(j)] = -1;
      in.sampled.push_back(sampled);
      if (round % 2 == 0) in.discard.push_back(random.below(4) == 0);
    }
    in.advance = random.below(2) == 0;
    in.vocab_size = 2 + random.below(2);
    const int64_t min_n = 1 + random.below(3);
    in.lookup = {min_n,
                 min_n + random.below(6),
                 1 + random.below(9),
                 random.below(90),
                 static_cast<int32_t>(random.below(2)),
                 random.below(2) == 0,
                 false,
                 nullptr,
                 0};
    const StepResult want = expected_step(in);
    const StepResult got = step(in);
    ASSERT_EQ(got.rows, want.rows) << "round " << round;
    ASSERT_EQ(got.num_tokens, want.num_tokens) << "round " << round;
    ASSERT_EQ(got.next, want.next) << "round " << round;
    ASSERT_EQ(got.num_sampled, want.num_sampled) << "round " << round;
    ASSERT_EQ(got.drafts, want.drafts) << "round " << round;
    ASSERT_EQ(got.num_draft, want.num_draft) << "round " << round;
    ASSERT_EQ(got.match_len, want.match_len) << "round " << round;
  }
}

}  // namespace
}  // namespace ngram_npu::test
