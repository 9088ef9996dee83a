"""Faults of the lookup that ngram_propose and ngram_step_ share: what, and the texts before and
after."""

from __future__ import annotations

# Of the operator that is given a workspace, so that what is left in it shows.
JOIN = {
    "all share one workspace": ("join_blocks(shared[i],", "join_blocks(shared[0],"),
    "the counter is raised before the rank is published": (
        "    if (block.best != 0) atomicMax(&shared.best, block.best);\n"
        "    block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);\n",
        "    block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);\n"
        "    if (block.best != 0) atomicMax(&shared.best, block.best);\n",
    ),
    "two ranks at once, one of which is lost": (
        "if (block.best != 0) atomicMax(&shared.best, block.best);",
        "if (block.best > *static_cast<volatile Rank*>(&shared.best)) "
        "atomicExch(&shared.best, block.best);",
    ),
    "the workspace is left as it is": (
        "if (shared != nullptr) shared[r] = {};",
        "",
    ),
    "only the first request's workspace is zeroed": (
        "if (shared != nullptr) shared[r] = {};",
        "if (shared != nullptr && r == 0) shared[r] = {};",
    ),
    "a block too few is waited for": ("- at / each + 1;", "- at / each;"),
    "a block too many is waited for": ("- at / each + 1;", "- at / each + 2;"),
    "shared rows are taken for a block's own": (
        "if (blocks == 1 || join",
        "if (next <= block.end || join",
    ),
    "a request's own place counts as one of its tiles": (
        "- at / each + 1;",
        "- (at - 1) / each + 1;",
    ),
    "every block settles": (
        "shared->left, &block.last)) return;",
        "shared->left, &block.last)) {}",
    ),
    "not all lengths are settled": (
        "r < p.batch; r += kLookupThreads",
        "r < p.batch; r += kLookupThreads + 1",
    ),
    "a share belongs to the request it follows": (
        "<= begin; ++i) at += n;",
        "< begin; ++i) at += n;",
    ),
    "shares that leave the rest to nobody": ("(total + groups - 1) / groups,", "total / groups,"),
    "a row that goes on in the next block is a block's own": (
        "if (blocks == 1 || join",
        "if (first == at || join",
    ),
    "requests have no place of their own where the share begins": (
        "block.its_first_tile = at + 1;",
        "block.its_first_tile = at;",
    ),
    "requests have no place of their own later on": (
        "block.its_first_tile = next + 1;",
        "block.its_first_tile = next;",
    ),
    "requests have no place of their own where they are found": (
        "at + (n = 1 + tiles_of(lookup.length(i)))",
        "at + (n = tiles_of(lookup.length(i)))",
    ),
    "on to the request behind the share": ("while (at < block.end) {", "while (at <= block.end) {"),
    "a share goes on behind the list": (
        "block.end = smaller(begin + each, total);",
        "block.end = begin + each;",
    ),
    "the rank as it was when the block came": (
        "    if (block.best != 0) atomicMax(&shared.best, block.best);\n"
        "    block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);\n"
        "    if (block.last) block.best = shared.best;\n",
        "    block.best = larger<Rank>(block.best, atomicMax(&shared.best, block.best));\n"
        "    block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);\n",
    ),
    "the joined rank is read as constant": (
        "if (block.last) block.best = shared.best;",
        "if (block.last) block.best = __ldg(&shared.best);",
    ),
    "the last of a row zeroes its workspace": (
        "    if (block.last) block.best = shared.best;\n",
        "    if (block.last) {\n      block.best = shared.best;\n      shared = {};\n    }\n",
    ),
    "one counter for two purposes": ("&shared->left", "&shared->arrived"),
    "the block of the highest number settles": (
        "if (!is_last_block(shared == nullptr ? nullptr : &shared->left, &block.last)) return;",
        "if (blockIdx.x + 1 != gridDim.x) return;",
    ),
    "settled only where there is a workspace": (
        "    if (shared != nullptr) shared[r] = {};\n",
        "    if (shared == nullptr) continue;\n    shared[r] = {};\n",
    ),
    "an edge of one round": (
        "for (int32_t i = lane(); i < count; i += kWarpSize) verify(",
        "if (const int32_t i = lane(); i < count) verify(",
    ),
    "no ends among the sampled tokens": (
        "head + (block_.tokens.length - 1 - behind);",
        "head + (smaller(block_.tokens.in_row, block_.tokens.length - 1) - behind);",
    ),
}
ARRIVING = {
    "a plain counter": (
        "return __nv_atomic_fetch_add(arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);",
        "__threadfence();\n"
        "  const uint32_t before = (*static_cast<volatile uint32_t*>(arrived))++;\n"
        "  __threadfence();\n"
        "  return before;",
    ),
    "arrives relaxed": ("__NV_ATOMIC_ACQ_REL", "__NV_ATOMIC_RELAXED"),
    "arrives in the block's scope": ("__NV_THREAD_SCOPE_DEVICE", "__NV_THREAD_SCOPE_BLOCK"),
    "no barrier after arriving": ("gridDim.x - 1;\n  __syncthreads();", "gridDim.x - 1;"),
    "the scan stops early": ("distance < kWarpSize", "distance < kWarpSize / 2"),
}
LOOKUP = {
    "the suffix is read before it is written": (
        "- 1 - thread];\n    }\n    __syncthreads();",
        "- 1 - thread];\n    }",
    ),
    "the best is read before all reported": (
        "search.report();\n  }\n  __syncthreads();",
        "search.report();\n  }",
    ),
    "the best begins with anything": ("    block.best = 0;\n", ""),
    "where max_n was found begins with anything": ("    block.found_in = INT32_MAX;\n", ""),
    "others stop in the tile itself": ("&block_.found_in) < tile;", "&block_.found_in) <= tile;"),
    "others stop a tile early": (
        "atomicMin(&block_.found_in, tile);",
        "atomicMin(&block_.found_in, tile - 1);",
    ),
    "others stop at a match of any length": (
        "    }\n    return true;\n  }\n\n  // Whether the last",
        "      if (need > options_.min_n && lane() == 0) atomicMin(&block_.found_in, tile);\n"
        "    }\n"
        "    return true;\n  }\n\n  // Whether the last",
    ),
    "each lane decides by itself to stop": (
        "if (__any_sync(kWholeWarp, found_before(tile))) return false;",
        "if (found_before(tile)) return false;",
    ),
    "a suffix of one token less": (
        "static_cast<int32_t>(options.max_n), tokens.length)",
        "static_cast<int32_t>(options.max_n) - 1, tokens.length)",
    ),
    "a warp's later chunks need not be better": (
        "return larger(static_cast<int32_t>(options_.min_n), best_len() + 1);",
        "return larger(static_cast<int32_t>(options_.min_n), best_len() + 2);",
    ),
    "an edge has to be better": (
        "larger(static_cast<int32_t>(options_.min_n), best_len());",
        "larger(static_cast<int32_t>(options_.min_n), best_len() + 1);",
    ),
    "the newest token matches itself": (
        "const int32_t ends = smaller(tokens.in_row, tokens.length - 1);",
        "const int32_t ends = smaller(tokens.in_row, tokens.length);",
    ),
    "no edge behind the vectors": (
        "count = head + (block_.tokens.length - 1 - behind)",
        "count = head",
    ),
    "no edge before the vectors": ("verify(i < head ? i :", "verify(i < head ? behind :"),
    "vectors from any address": (
        "tokens.length - 1), -misaligned &",
        "tokens.length - 1), 0 &",
    ),
    "vectors beyond the last": (
        "static_cast<uint32_t>(num_vectors_ - 1));",
        "static_cast<uint32_t>(num_vectors_));",
    ),
    "the vector before the lane's own is the last lane's": (
        "return lane() == 0 ? second_ : theirs;",
        "return theirs;",
    ),
    "the second token of the wrong place": (
        "is_wanted(v.y, v.z) | is_wanted(v.z, v.w)",
        "is_wanted(v.y, v.z) | is_wanted(v.y, v.w)",
    ),
    "the second token of the wrong place, again": (
        "is_wanted(data.y, data.z)",
        "is_wanted(data.x, data.z)",
    ),
    "the second token counts though one is enough": (
        "need > 1 ? 0x9e3779b1u : 0;",
        "0x9e3779b1u;",
    ),
    "longer than max_n": (
        "const int32_t limit = smaller(static_cast<int32_t>(options_.max_n), end + 1);",
        "const int32_t limit = end + 1;",
    ),
    "before the row's first token": ("if (end + 1 < need || ", "if ("),
    "the latest as the earliest": (
        "(is_latest() ? chunks - 1 - chunk : chunk)",
        "chunk",
    ),
    "tiles are left out": ("tile < stop; ++tile) {", "tile < stop; tile += 2) {"),
    "only the first tile": (
        "if (!search.look(tile, now)) break;",
        "if (!search.look(tile, now) || true) break;",
    ),
    "a tile is looked at twice": ("now[u] = next[u];", "now[u] = now[u];"),
    "no edges": ("if (first == 0 && thread", "if (first == 1 && thread"),
    "places of shorter matches count": (
        "static_cast<int32_t>(len_of(best_)) == longest ?",
        "true ?",
    ),
    "the rank of the block alone": ("    if (block.last) block.best = shared.best;\n", ""),
    "no barrier after arriving": (
        "  __syncthreads();\n  return block.last;",
        "  return block.last;",
    ),
    "drafts beyond the count": ("j < count ? tokens[", "j <= count ? tokens["),
    "a share is one tile short": (
        "smaller(begin + each, total);",
        "smaller(begin + each - 1, total);",
    ),
    "shares overlap": ("smaller(begin + each, total);", "smaller(begin + each + 1, total);"),
    "a share is used before it is known": (
        "block.its_first_tile = total;\n  }\n  __syncthreads();",
        "block.its_first_tile = total;\n  }",
    ),
    "a tile too few for the row": (
        "(length + kTileTokens - 1) / kTileTokens));",
        "length / kTileTokens));",
    ),
    "what the block shares is overwritten early": (
        "    __syncthreads();  // all are done with what the block shares\n",
        "",
    ),
    "the next request is read before it is written": (
        "block.its_first_tile = next + 1;\n    }\n    __syncthreads();\n  }",
        "block.its_first_tile = next + 1;\n    }\n  }",
    ),
    "requests of the first threads only": (
        "smaller(first + per_thread, batch);",
        "smaller(first + 1, batch);",
    ),
    "the requests behind a multiple of the threads": (
        "const int32_t per_thread = (batch + kLookupThreads - 1) / kLookupThreads;",
        "const int32_t per_thread = larger(batch / kLookupThreads, 1);",
    ),
    "a row that ends with a share waits for the next block": (
        "blocks = (next - 1) / each",
        "blocks = next / each",
    ),
    "a later request begins with the share": (
        "first = larger(static_cast<int32_t>(blockIdx.x) * each, at)",
        "first = static_cast<int32_t>(blockIdx.x) * each",
    ),
    "a block without a share looks up": (
        "    if (begin >= total) block.its_first_tile = total;\n",
        "",
    ),
    "ranks are extended by their sign": (
        "const auto place = static_cast<uint32_t>(end);\n  return",
        "const auto place = end;\n  return",
    ),
    "an occurrence at the row's end": (
        "end > int64_t{tokens.length} - 2 ||",
        "end > int64_t{tokens.length} - 1 ||",
    ),
    "an occurrence anywhere": (
        "if (end > int64_t{tokens.length} - 2 || len > options.max_n) return {-1, 0};",
        "",
    ),
    "the latest looks at a tile in the other order": (
        "first_ + (tile * kTileVectors + u) * step;",
        "first_ + (tile * kTileVectors + (is_latest() ? kTileVectors - 1 - u : u)) * step;",
    ),
    "the latest begins a chunk late": (
        "(is_latest() ? chunks - 1 - chunk : chunk)",
        "(is_latest() ? chunks - chunk : chunk)",
    ),
    "the latest leaves out what fills no chunk": (
        "(num_vectors_ + kWarpSize - 1) / kWarpSize;",
        "num_vectors_ / kWarpSize;",
    ),
    "vectors before the first": (
        "smaller(static_cast<uint32_t>(v), static_cast<uint32_t>(num_vectors_ - 1));",
        "static_cast<uint32_t>(smaller(v, num_vectors_ - 1));",
    ),
    "a last vector that is not whole": (
        "num_vectors_ = (ends - head) / kVectorTokens;",
        "num_vectors_ = (ends - head + kVectorTokens - 1) / kVectorTokens;",
    ),
    "as many tiles as the list has": ("    stop = smaller(stop, search.num_tiles());\n", ""),
    "each lane looks again by itself": (
        "return !__any_sync(kWholeWarp, noted) || look_again(tile);",
        "return !noted || look_again(tile);",
    ),
    "the search ends at one token less than max_n": (
        "if (need > options_.max_n) {",
        "if (need >= options_.max_n) {",
    ),
    "the token before a vector is the last but one": (
        "__shfl_up_sync(kWholeWarp, v.w, 1)",
        "__shfl_up_sync(kWholeWarp, v.z, 1)",
    ),
    "the edge behind begins late by the one before": (
        "behind + (i - head), need)",
        "behind + i, need)",
    ),
    "nothing matches at the row's very beginning": ("if (end + 1 < need || ", "if (end < need || "),
    "a match may not take the row's first token": (
        "smaller(static_cast<int32_t>(options_.max_n), end + 1);",
        "smaller(static_cast<int32_t>(options_.max_n), end);",
    ),
    "a match shorter than needed": ("if (len >= need) best_ =", "best_ ="),
    "reports without an atomic": (
        "if (lane() == 0 && longest > 0) atomicMax(&block_.best, rank);",
        "if (lane() == 0 && rank > block_.best) block_.best = rank;",
    ),
}
