// ngram_index_propose_: ngram_propose with an index. Contract: docs/ops/ngram_index_propose.md; layout of the index:
// core/ngram_index_layout.h; why its results are exact: docs/design/index.md.
#pragma once

#include "core/ngram_index_layout.h"
#include "core/ngram_ladder.h"
#include "core/ngram_propose.h"

namespace ngram_npu {

// Indexing this many tokens takes about a millisecond.
constexpr int64_t kNgramIndexCatchUpTokens = 32768;

struct NgramIndexProposeParams {
  NgramProposeParams propose;  // its executor is not used: one thread is fastest here
  IndexAccess index;
  // The number of tokens that one call may index besides the newest ones (a prompt that was not appended, a rebuilt
  // slot), for all rows together. A row with more tokens is scanned, and the next call indexes more of it, so that no
  // step stalls. Negative: no limit.
  int64_t catch_up_tokens;
  LadderOptions ladder;
};

}  // namespace ngram_npu
