// The scan without vectors.
#include "cpu/lookup_impl.h"

namespace ngram_npu::cpu {
namespace {

struct Scalar {
  static constexpr int64_t kLanes = 1;
  using Reg = int32_t;
  static Reg splat(int32_t token) { return token; }
  static uint64_t equal(const int32_t* at, Reg token) { return *at == token; }
};

}  // namespace

Occurrence find_occurrence_scalar(const int32_t* tokens, int64_t num_tokens, int64_t min_n, int64_t max_n,
                                  int32_t match_policy) {
  return find_with<Scalar>(tokens, num_tokens, min_n, max_n, match_policy);
}

}  // namespace ngram_npu::cpu
