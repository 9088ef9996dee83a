// correct_num_computed_tokens_: correct the host's counts for rejected drafts. Contract:
// docs/ops/correct_num_computed_tokens.md.
#pragma once

#include "core/common.h"

namespace ngram_npu {

struct CorrectNumComputedTokensParams {
  Gm<int32_t> num_computed_tokens;  // [>= B], written in [0, B)
  Gm<int32_t> num_accepted_tokens;  // [>= B], written in [0, B)
  IndexArray prev_positions;        // [B]
  Gm<const int32_t> num_sampled_prev;
  Gm<const int32_t> num_draft_prev;
  // The size of the shortest of num_computed_tokens and the two above.
  int64_t num_previous;
  Gm<const int32_t> host_num_computed_tokens;  // [B]
  int64_t batch;
};

// A request's new counts: corrected if it had drafts in the previous step, otherwise the host's.
struct CorrectedCounts {
  int32_t num_computed;
  int32_t num_accepted;
  bool accepted_changes;
};

// Position of request i in the previous step if it had drafts there, otherwise -1. Here and below `Counts` is the
// parameters or a kernel's copies of their arrays under the same names.
template <class Counts>
NGRAM_FN int64_t drafted_at(const Counts& c, int64_t i) {
  const int64_t p = c.prev_positions[i];
  return p < 0 || p >= c.num_previous || c.num_draft_prev[p] <= 0 ? -1 : p;
}

// Number of tokens that the request at previous position p gained; never more than the host assumed, because it
// allocated blocks for that number only.
template <class Counts>
NGRAM_FN int32_t sampled_at(const Counts& c, int64_t p) {
  const int32_t sampled = c.num_sampled_prev[p];
  const int32_t drafts = c.num_draft_prev[p];
  return sampled > drafts ? drafts + 1 : sampled;
}

// Reads the old num_computed_tokens of any position, so no position may be overwritten before all are corrected.
template <class Counts>
NGRAM_FN CorrectedCounts corrected(const Counts& c, int64_t i) {
  const int64_t p = drafted_at(c, i);
  if (p < 0) return {c.host_num_computed_tokens[i], 0, false};
  const int32_t sampled = sampled_at(c, p);
  return {wrap_add(c.num_computed_tokens[p], sampled), sampled, true};
}

}  // namespace ngram_npu
