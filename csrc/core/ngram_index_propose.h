// ngram_index_propose_: ngram_propose, answered from an index. Contract: docs/ops/ngram_index_propose.md; what the
// index tensor contains: core/ngram_index_layout.h; why its answers are exact: docs/design/index.md.
#pragma once

#include "core/ngram_index_access.h"
#include "core/ngram_ladder.h"
#include "core/ngram_propose.h"

namespace ngram_npu {

// About a millisecond of building.
constexpr int64_t kNgramIndexCatchUpTokens = 32768;

struct NgramIndexProposeParams {
  NgramProposeParams propose;  // its executor is not used: one thread is fastest here
  IndexAccess index;
  // The number of tokens that one call may index beyond the newest ones (a prompt that was not appended, a rebuilt
  // slot): over all rows on the CPU, of each row on a GPU, which has a limit of its own besides. A row that is not
  // caught up within it is scanned, and goes on in the next call: no step stalls. Negative: no limit.
  int64_t catch_up_tokens;
  LadderOptions ladder;
};

}  // namespace ngram_npu
