// The row scan with NEON.
#include <arm_neon.h>

#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Neon {
  static constexpr int64_t kLanes = 4;
  using Reg = int32x4_t;
  static Reg splat(int32_t token) { return vdupq_n_s32(token); }
  static uint64_t compare(const int32_t* tokens, Reg token) {
    const uint32x4_t lane_bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vceqq_s32(vld1q_s32(tokens), token), lane_bit));
  }
};

}  // namespace

Match find_match_neon(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Neon>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
