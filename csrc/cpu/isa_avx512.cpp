// The row scan and the operations on the index table with AVX-512. Only this file is compiled with AVX-512 enabled.
#include <immintrin.h>

#include "cpu/lookup_impl.h"
#include "cpu/ngram_index_walk.h"

namespace ngram_npu::cpu {
namespace {

struct Avx512 {
  static constexpr int64_t kLanes = 16;
  using Reg = __m512i;
  static Reg splat(int32_t token) { return _mm512_set1_epi32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tokens), token);
  }

  static uint32_t match_lanes(const uint32_t* line, uint32_t expected, uint32_t mask) {
    const __m512i different_lanes =
        _mm512_xor_si512(_mm512_loadu_si512(line), _mm512_set1_epi32(static_cast<int32_t>(expected)));
    return _mm512_testn_epi32_mask(different_lanes, _mm512_set1_epi32(static_cast<int32_t>(mask)));
  }

  static uint32_t find_empty_lane(const uint32_t* line) {  // returns 15 if no lane is empty
    const __m512i entries = _mm512_loadu_si512(line);
    return static_cast<uint32_t>(__builtin_ctz(_mm512_testn_epi32_mask(entries, entries) | 0x8000u));
  }

  static uint32_t count_common_suffix8(const int32_t* a, const int32_t* b) {  // the lowest bit ends the count
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m256i equal = _mm256_cmpeq_epi32(first, second);
    const uint32_t different_lanes = ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
    return static_cast<uint32_t>(__builtin_clz((different_lanes << 24) | 0x800000u));
  }

  static uint32_t count_common_suffix16(const int32_t* a, const int32_t* b) {
    const uint32_t different_lanes = _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    return static_cast<uint32_t>(__builtin_clz((different_lanes << 16) | 0x8000u));
  }

  static constexpr bool kHasGather = true;
  static void gather(const uint32_t* words, const void* offsets, void* output) {
    // Uses the masked intrinsic, because gcc 12 warns about the undefined source of the unmasked intrinsic.
    const __m512i gathered = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), static_cast<__mmask16>(0xffff),
                                                         _mm512_loadu_si512(offsets), words, sizeof *words);
    _mm512_storeu_si512(output, gathered);
  }

  static uint32_t split_line(const uint32_t* line, uint32_t home, uint32_t depth, uint32_t* low, uint32_t* high) {
    const __m512i entries = _mm512_loadu_si512(line);
    const __m512i next_bits = _mm512_set1_epi32(static_cast<int32_t>(next_mask(depth)));
    // Adding the bits above `next` to themselves shifts these bits up by one bit.
    const __m512i upper_bits = _mm512_and_si512(entries, _mm512_set1_epi32(static_cast<int32_t>(~next_mask(depth))));
    const __m512i split_entries =
        _mm512_or_si512(_mm512_add_epi32(upper_bits, upper_bits), _mm512_and_si512(entries, next_bits));
    const __m512i home_bits = _mm512_set1_epi32(static_cast<int32_t>((kGroupLines - 1) << home_shift(depth)));
    const __m512i home_value = _mm512_set1_epi32(static_cast<int32_t>(home << home_shift(depth)));
    const __mmask16 used_lanes = _mm512_test_epi32_mask(entries, entries);
    const __mmask16 home_lanes =
        _mm512_mask_testn_epi32_mask(used_lanes, _mm512_xor_si512(entries, home_value), home_bits);
    const __mmask16 high_lanes = _mm512_mask_cmplt_epi32_mask(home_lanes, entries, _mm512_setzero_si512());
    _mm512_storeu_si512(low,
                        _mm512_maskz_compress_epi32(static_cast<__mmask16>(home_lanes & ~high_lanes), split_entries));
    _mm512_storeu_si512(high, _mm512_maskz_compress_epi32(high_lanes, split_entries));
    return static_cast<uint32_t>(used_lanes & ~home_lanes);
  }
};

}  // namespace

Match find_match_avx512(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Avx512>(tokens, num_tokens, min_n, max_n, match_policy);
}

const IndexOperations kIndexOperationsAvx512 = {look_up<Avx512>, extend<Avx512>};

}  // namespace ngram_npu::cpu
