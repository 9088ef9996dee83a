// The rows of ngram_propose and its forms: they are looked up as they stand.
#pragma once

#include "cpu/drafter.h"

namespace ngram_npu::cpu {
namespace {

GrownRow as_it_stands(const NgramProposeParams& p, int64_t i) {
  const LiveRow live = live_row(p, i);
  return {live.row,      live.length,       live.length, larger<int64_t>(live.length - kMaxSampledWidth, 0),
          live.row >= 0, unused_token(p, i)};
}

using ProposeDrafter = Drafter<NgramProposeParams, as_it_stands>;

}  // namespace
}  // namespace ngram_npu::cpu
