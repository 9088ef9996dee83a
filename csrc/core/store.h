// Hash functions of the store.
#pragma once

#include "core/common.h"

namespace ngram_npu::store {

// The output function of splitmix64.
NGRAM_FN uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Base of the polynomial hash of an n-gram: the sum of token * base^j, where j is 0 for the n-gram's last token.
constexpr uint64_t kHashBase = 0x9e3779b97f4a7c15u;

NGRAM_FN uint64_t scope_seed(uint64_t scope) { return mix(scope); }

// Key of an n-gram with this hash and level, in a scope with this seed.
NGRAM_FN uint64_t key_of(uint64_t ngram_hash, uint64_t seed, uint32_t level) {
  return mix((ngram_hash ^ seed) + (level + 1) * kHashBase);
}

}  // namespace ngram_npu::store
