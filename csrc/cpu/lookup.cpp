#include "cpu/lookup.h"

namespace ngram_npu::cpu {

void draft_row(FindOccurrence find, const int32_t* tokens, int64_t num_tokens, int64_t capacity,
               const LookupOptions& options, int32_t unused, int32_t* draft, int32_t* num_draft, int32_t* match_len) {
  Occurrence found{-1, 0};
  if (may_draft(num_tokens, capacity, options)) {
    found = find(tokens, num_tokens, options.min_n, options.max_n, options.match_policy);
  }
  write_draft(tokens, num_tokens, found, options, unused, draft, num_draft, match_len);
}

}  // namespace ngram_npu::cpu
