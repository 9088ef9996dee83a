// The row scan with AVX2. Only this file is compiled with AVX2 enabled.
#include <immintrin.h>

#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Avx2 {
  static constexpr int64_t kLanes = 8;
  using Reg = __m256i;
  static Reg splat(int32_t token) { return _mm256_set1_epi32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens));
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(loaded, token))));
  }
};

}  // namespace

Match find_match_avx2(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Avx2>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
