// The lookup without an index on the CPU: one pass over the row with the machine's widest vectors.
#pragma once

#include "core/lookup_rules.h"

namespace ngram_npu::cpu {

// Finds the occurrence that docs/ops/ngram_propose.md defines in tokens[0..num_tokens), num_tokens >= 2.
using FindOccurrence = Occurrence (*)(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n,
                                      int32_t match_policy);

Occurrence find_occurrence_scalar(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#if defined(__x86_64__)
Occurrence find_occurrence_avx2(const int32_t*, int64_t, int64_t, int64_t, int32_t);
Occurrence find_occurrence_avx512(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#elif defined(__aarch64__)
Occurrence find_occurrence_neon(const int32_t*, int64_t, int64_t, int64_t, int32_t);
#endif

// The function for the instruction set in use (instruction_set.h).
FindOccurrence find_occurrence();

}  // namespace ngram_npu::cpu
