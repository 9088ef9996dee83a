#include "op_calls.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ngram_npu::test {
namespace {

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

}  // namespace

ProposeResult propose(const ProposeInputs& in, Layout layout) {
  const Flush flush = flush_of(layout);
  Rows rows(in.rows, in.capacity, layout);
  rows.freeze();
  Guarded<int32_t> num_tokens(lengths_of(in.rows, in.num_tokens), flush);
  num_tokens.freeze();
  const GuardedIndices row_indices(in.row_indices, flush);
  Guarded<int32_t> num_sampled(in.num_sampled, flush);
  num_sampled.freeze();

  NgramProposeParams p{};
  p.token_ids = rows.view<const int32_t>();
  p.num_tokens = num_tokens.data();
  p.row_indices = row_indices.get();
  p.num_sampled = in.num_sampled.empty() ? nullptr : num_sampled.data();
  p.batch = in.row_indices.bytes > 0 ? static_cast<int64_t>(in.row_indices.values.size()) : p.token_ids.rows;
  p.lookup = in.lookup;
  const Guarded<int32_t> drafts = output(p.batch * p.lookup.k, layout);
  const Guarded<int32_t> num_draft = output(p.batch, layout);
  const Guarded<int32_t> match_len = output(p.batch, layout);
  p.draft_token_ids = {drafts.data(), p.lookup.k, 4};
  p.num_draft_tokens = num_draft.data();
  p.match_len = match_len.data();

  const std::vector<Tokens> before = rows.values();
  EXPECT_EQ(ngram_npu_cpu_ngram_propose(&p, nullptr), kOk);
  EXPECT_EQ(rows.values(), before);
  EXPECT_TRUE(rows.intact() && drafts.intact() && num_draft.intact() && match_len.intact());
  return {drafts.values(), num_draft.values(), match_len.values()};
}

ProposeResult propose(const ProposeInputs& in) {
  const ProposeResult result = propose(in, kLayouts[0]);
  for (const Layout layout : kLayouts) {
    EXPECT_TRUE(propose(in, layout) == result) << "layout " << static_cast<int>(layout);
  }
  return result;
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

}  // namespace ngram_npu::test
