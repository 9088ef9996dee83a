// The rows of ngram_step_ and ngram_index_step_: the sampled tokens are appended, then the row is looked up.
#pragma once

#include <cstring>

#include "core/ngram_index_step.h"
#include "cpu/drafter.h"

namespace ngram_npu::cpu {
namespace {

GrownRow append(const NgramStepParams& p, int64_t i) {
  const Accepted a = accept(p, i);
  const int64_t length = a.old_length + a.num_appended;
  p.next_token_ids[i] = a.next_token;
  p.num_sampled[i] = static_cast<int32_t>(a.num_sampled);
  if (a.num_appended > 0) {
    int32_t* to = p.token_ids[a.row] + a.old_length;
    std::memcpy(to, p.sampled_token_ids[i], static_cast<size_t>(a.num_appended) * sizeof(int32_t));
    if (p.advance) p.num_tokens[a.row] = static_cast<int32_t>(length);
  }
  return {a.row, length, a.old_length, a.old_length, drafts(a), unused_token(p, a)};
}

using StepDrafter = Drafter<NgramStepParams, append>;

}  // namespace
}  // namespace ngram_npu::cpu
