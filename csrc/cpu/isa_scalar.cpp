// The row scan and the operations on the index table without vector instructions.
#include "cpu/lookup_impl.h"
#include "cpu/ngram_index_walk.h"

namespace ngram_npu::cpu {
namespace {

struct Scalar : ScalarLanes {
  static constexpr int64_t kLanes = 1;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t compare(const int32_t* tokens, Reg token) { return *tokens == token; }

  static uint32_t match_lanes(const uint32_t* line, uint32_t expected, uint32_t mask) {
    uint32_t lanes = 0;
    for (uint32_t i = 0; i < kLineWords; ++i) lanes |= static_cast<uint32_t>(((line[i] ^ expected) & mask) == 0) << i;
    return lanes;
  }

  static uint32_t find_empty_lane(const uint32_t* line) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < kLineWords; ++i) count += line[i] != 0;
    return count < kLineWords ? count : kLineWords - 1;
  }

  template <uint32_t kMaxTokens>
  static uint32_t count_common_suffix(const int32_t* a, const int32_t* b) {
    uint32_t num_equal = 0;
    while (num_equal < kMaxTokens && a[kMaxTokens - 1 - num_equal] == b[kMaxTokens - 1 - num_equal]) ++num_equal;
    return num_equal;
  }
  static uint32_t count_common_suffix8(const int32_t* a, const int32_t* b) { return count_common_suffix<8>(a, b); }
  static uint32_t count_common_suffix16(const int32_t* a, const int32_t* b) { return count_common_suffix<16>(a, b); }
};

}  // namespace

Match find_match_scalar(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Scalar>(tokens, num_tokens, min_n, max_n, match_policy);
}

const IndexOperations kIndexOperationsScalar = {look_up<Scalar>, extend<Scalar>};

}  // namespace ngram_npu::cpu
