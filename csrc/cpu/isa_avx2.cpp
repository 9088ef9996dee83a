// The row scan and the operations on the index table with AVX2. Only this file is compiled with AVX2 enabled.
#include <immintrin.h>

#include "cpu/lookup_impl.h"
#include "cpu/ngram_index_walk.h"

namespace ngram_npu::cpu {
namespace {

struct Avx2 : ScalarLanes {  // ScalarLanes: the operations that are not defined here
  static constexpr int64_t kLanes = 8;
  using Reg = __m256i;
  static Reg splat(int32_t token) { return _mm256_set1_epi32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens));
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(loaded, token))));
  }

  static __m256i load(const void* address) { return _mm256_loadu_si256(static_cast<const __m256i*>(address)); }

  // Bit i of the result is set if lane i is 0.
  static uint32_t find_zero_lanes(__m256i lanes) {
    const __m256i zero_lanes = _mm256_cmpeq_epi32(lanes, _mm256_setzero_si256());
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zero_lanes)));
  }

  static uint32_t find_equal_lanes(const int32_t* a, const int32_t* b) {
    return find_zero_lanes(_mm256_xor_si256(load(a), load(b)));
  }

  static uint32_t match_lanes(const uint32_t* line, uint32_t expected, uint32_t mask) {
    const __m256i expected_lanes = _mm256_set1_epi32(static_cast<int32_t>(expected));
    const __m256i masks = _mm256_set1_epi32(static_cast<int32_t>(mask));
    return find_zero_lanes(_mm256_and_si256(_mm256_xor_si256(load(line), expected_lanes), masks)) |
           find_zero_lanes(_mm256_and_si256(_mm256_xor_si256(load(line + 8), expected_lanes), masks)) << 8;
  }

  static uint32_t find_empty_lane(const uint32_t* line) {  // returns 15 if no lane is empty
    return static_cast<uint32_t>(
        __builtin_ctz(find_zero_lanes(load(line)) | find_zero_lanes(load(line + 8)) << 8 | 0x8000u));
  }

  static uint32_t count_common_suffix8(const int32_t* a, const int32_t* b) {  // the lowest bit ends the count
    return static_cast<uint32_t>(__builtin_clz((~find_equal_lanes(a, b) << 24) | 0x800000u));
  }

  static uint32_t count_common_suffix16(const int32_t* a, const int32_t* b) {
    const uint32_t different_lanes = ~(find_equal_lanes(a, b) | find_equal_lanes(a + 8, b + 8) << 8);
    return static_cast<uint32_t>(__builtin_clz((different_lanes << 16) | 0x8000u));
  }
};

}  // namespace

Match find_match_avx2(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Avx2>(tokens, num_tokens, min_n, max_n, match_policy);
}

const IndexOperations kIndexOperationsAvx2 = {look_up<Avx2>, extend<Avx2>};

}  // namespace ngram_npu::cpu
