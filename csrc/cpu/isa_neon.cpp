// The row scan and the operations on the index table with NEON.
#include <arm_neon.h>

#include "cpu/lookup_impl.h"
#include "cpu/ngram_index_walk.h"

namespace ngram_npu::cpu {
namespace {

struct Neon : ScalarLanes {  // ScalarLanes: the operations that are not defined here
  static constexpr int64_t kLanes = 4;
  using Reg = int32x4_t;
  static Reg splat(int32_t token) { return vdupq_n_s32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    const uint32x4_t lane_bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vceqq_s32(vld1q_s32(tokens), token), lane_bit));
  }

  // Lane i of the result is bit first + i if lane i of `lanes` is all ones, otherwise 0.
  static uint32x4_t select_lane_bits(uint32x4_t lanes, int first) {
    constexpr uint32x4_t kLaneBit = {1, 2, 4, 8};
    return vandq_u32(lanes, vshlq_u32(kLaneBit, vdupq_n_s32(first)));
  }

  // Bit i of the result is set if word i of the line satisfies `test`, which tests four words at a time.
  template <class Test>
  static uint32_t find_lanes(const uint32_t* line, const Test& test) {
    uint32x4_t bits = select_lane_bits(test(vld1q_u32(line)), 0);
    bits = vorrq_u32(bits, select_lane_bits(test(vld1q_u32(line + 4)), 4));
    bits = vorrq_u32(bits, select_lane_bits(test(vld1q_u32(line + 8)), 8));
    bits = vorrq_u32(bits, select_lane_bits(test(vld1q_u32(line + 12)), 12));
    return vaddvq_u32(bits);
  }

  static uint32_t match_lanes(const uint32_t* line, uint32_t expected, uint32_t mask) {
    const uint32x4_t expected_lanes = vdupq_n_u32(expected);
    const uint32x4_t masks = vdupq_n_u32(mask);
    return find_lanes(line,
                      [&](uint32x4_t words) { return vceqzq_u32(vandq_u32(veorq_u32(words, expected_lanes), masks)); });
  }

  static uint32_t find_empty_lane(const uint32_t* line) {  // returns 15 if no lane is empty
    const uint32_t empty = find_lanes(line, [](uint32x4_t words) { return vceqzq_u32(words); });
    return static_cast<uint32_t>(__builtin_ctz(empty | 0x8000u));
  }

  // Bit i of the result is set if a[i] != b[i], for i in [0, 8).
  static uint32_t find_different_lanes(const int32_t* a, const int32_t* b) {
    const uint32x4_t low = vmvnq_u32(vceqq_s32(vld1q_s32(a), vld1q_s32(b)));
    const uint32x4_t high = vmvnq_u32(vceqq_s32(vld1q_s32(a + 4), vld1q_s32(b + 4)));
    return vaddvq_u32(vorrq_u32(select_lane_bits(low, 0), select_lane_bits(high, 4)));
  }

  static uint32_t count_common_suffix8(const int32_t* a, const int32_t* b) {  // the lowest bit ends the count
    return static_cast<uint32_t>(__builtin_clz((find_different_lanes(a, b) << 24) | 0x800000u));
  }

  static uint32_t count_common_suffix16(const int32_t* a, const int32_t* b) {
    const uint32_t different_lanes = find_different_lanes(a, b) | find_different_lanes(a + 8, b + 8) << 8;
    return static_cast<uint32_t>(__builtin_clz((different_lanes << 16) | 0x8000u));
  }
};

}  // namespace

Match find_match_neon(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Neon>(tokens, num_tokens, min_n, max_n, match_policy);
}

const IndexOperations kIndexOperationsNeon = {look_up<Neon>, extend<Neon>};

}  // namespace ngram_npu::cpu
