// The row scan with AVX-512. Only this file is compiled with AVX-512 enabled.
#include <immintrin.h>

#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Avx512 {
  static constexpr int64_t kLanes = 16;
  using Reg = __m512i;
  static Reg splat(int32_t token) { return _mm512_set1_epi32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tokens), token);
  }
};

}  // namespace

Match find_match_avx512(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Avx512>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
