// The row scan without vector instructions.
#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Scalar {
  static constexpr int64_t kLanes = 1;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t compare(const int32_t* tokens, Reg token) { return *tokens == token; }
};

}  // namespace

Match find_match_scalar(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n, int32_t match_policy) {
  return find_match_with<Scalar>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
