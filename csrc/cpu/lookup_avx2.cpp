// The scan with AVX2, compiled for it alone.
#include <immintrin.h>

#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Avx2 {
  static constexpr int64_t kLanes = 8;
  using Reg = __m256i;
  static Reg splat(int32_t token) { return _mm256_set1_epi32(token); }
  static uint64_t equal(const int32_t* at, Reg token) {
    const __m256i found = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(found, token))));
  }
};

}  // namespace

Occurrence find_occurrence_avx2(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n,
                                int32_t match_policy) {
  return find_with<Avx2>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
