// Functions of the n-gram lookup that ngram_propose and ngram_step_ share.
#pragma once

#include "core/common.h"

namespace ngram_npu {

// The arguments that all lookups share.
struct LookupOptions {
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t max_len;
  int64_t vocab_size;  // ids outside [0, vocab_size) are never drafted
  int32_t match_policy;
  bool overlap;
  bool fill;  // fill the positions after the draft: DraftLengths
};

// Output tensor of the drafts: [B, k] int32 or int64; rows are `stride` items apart.
struct DraftRows {
  Gm<void> data;
  int64_t stride;
  int32_t bytes;  // 4 or 8

  NGRAM_FN void set(int64_t row, int64_t j, int32_t token) const {
    if (bytes == 8) {
      static_cast<Gm<int64_t>>(data)[row * stride + j] = token;
    } else {
      static_cast<Gm<int32_t>>(data)[row * stride + j] = token;
    }
  }
};

// A match: the `len` tokens that end at position `end` equal the last `len` tokens of the row. len 0: no match.
struct Match {
  int64_t end;
  int64_t len;
};

// The number of tokens that may be drafted for a row before the row reaches max_len. The lengths are compared first,
// because their difference could overflow.
NGRAM_FN int64_t draft_budget(int64_t k, int64_t max_len, int64_t num_tokens) {
  return max_len <= num_tokens ? 0 : smaller(k, max_len - num_tokens);
}

// The row of a request and the row's number of tokens; {-1, 0} if the request has no usable row.
struct RequestRow {
  int64_t row;
  int64_t length;
};

// A lookup needs at least two tokens, and num_tokens must not exceed the row's capacity.
NGRAM_FN bool is_lookup_possible(int64_t num_tokens, int64_t capacity) {
  return num_tokens >= 2 && num_tokens <= capacity;
}

// Whether tokens may be drafted for the row. If not, the row is not read.
NGRAM_FN bool may_draft(int64_t num_tokens, int64_t capacity, const LookupOptions& options) {
  return is_lookup_possible(num_tokens, capacity) && draft_budget(options.k, options.max_len, num_tokens) > 0;
}

// The number of tokens to draft after a match that ends at `end`.
NGRAM_FN int64_t draft_length(int64_t end, int64_t num_tokens, int64_t budget, bool overlap) {
  return overlap ? budget : smaller(budget, num_tokens - end - 1);
}

// The position from which draft token j is read. After the end of the row, the draft repeats with the period
// num_tokens - start. Device kernels use uint32_t as Int, which is enough for any row.
template <class Int>
NGRAM_FN Int draft_read_position(Int end, Int num_tokens, Int j) {
  const Int start = end + 1;
  return start + j < num_tokens ? start + j : start + j % (num_tokens - start);
}

// Words of workspace per request for a lookup on a device, where several thread blocks may search the same row.
constexpr int64_t kLookupWorkspaceWords = 4;
NGRAM_FN int64_t lookup_workspace_words(int64_t batch) { return kLookupWorkspaceWords * batch; }

// How many output positions of a request are filled from its row: num_drafted tokens of the draft and, with `fill`, the
// tokens that follow them.
struct DraftLengths {
  int64_t num_drafted;
  int64_t num_filled;
};

// The lengths if all tokens were valid. With `fill`, num_filled is not limited by max_len.
NGRAM_FN DraftLengths max_draft_lengths(Match match, int64_t num_tokens, const LookupOptions& options) {
  if (match.len == 0) return {0, 0};
  const int64_t budget = draft_budget(options.k, options.max_len, num_tokens);
  const int64_t num_drafted = draft_length(match.end, num_tokens, budget, options.overlap);
  return {num_drafted, options.fill ? draft_length(match.end, num_tokens, options.k, options.overlap) : num_drafted};
}

// The draft and the tokens after it end before the first invalid id, which num_valid valid ids precede.
NGRAM_FN DraftLengths end_before_invalid_id(DraftLengths lengths, int64_t num_valid) {
  return {smaller(lengths.num_drafted, num_valid), smaller(lengths.num_filled, num_valid)};
}

// Row has an operator[] that returns the token at a position.
template <class Row>
NGRAM_FN DraftLengths draft_lengths(const Row& row, Match match, int64_t num_tokens, const LookupOptions& options) {
  const DraftLengths lengths = max_draft_lengths(match, num_tokens, options);
  int64_t num_valid = 0;
  while (num_valid < lengths.num_filled &&
         is_valid_token(row[draft_read_position(match.end, num_tokens, num_valid)], options.vocab_size))
    ++num_valid;
  return end_before_invalid_id(lengths, num_valid);
}

// With `fill`, the token for output positions that are not filled from a row whose newest token is `newest_token`:
// padding is a valid id, too. Without `fill`, these positions have no token.
NGRAM_FN int32_t padding_after(int32_t newest_token, int64_t vocab_size) {
  if (vocab_size <= 0) return kNoToken;
  return is_valid_token(newest_token, vocab_size) ? newest_token : 0;
}

// The match length to report: 0 if nothing is drafted.
NGRAM_FN int32_t reported_match_len(Match match, int64_t num_draft_tokens) {
  return num_draft_tokens > 0 ? static_cast<int32_t>(match.len) : 0;
}

}  // namespace ngram_npu
