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
    "a block too few is waited for": (
        "share.block_of(at) + 1, block)",
        "share.block_of(at), block)",
    ),
    "a block too many is waited for": (
        "share.block_of(at) + 1, block)",
        "share.block_of(at) + 2, block)",
    ),
    "shared rows are taken for a block's own": (
        "share.begin <= at && next <= share.end;",
        "next <= share.end;",
    ),
    "the longer shares are counted as the others": (
        "tile < longer ? tile / (each + 1) :",
        "false ? tile / (each + 1) :",
    ),
    "every block settles": (
        "shared->left, &block.last)) return;",
        "shared->left, &block.last)) {}",
    ),
    "not all lengths are settled": (
        "r < p.batch; r += kLookupThreads",
        "r < p.batch; r += kLookupThreads + 1",
    ),
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
        "share.begin + share.each + (group < share.with_one_more);",
        "share.begin + share.each;",
    ),
    "shares overlap": (
        "share.end = share.begin + share.each + (group < share.with_one_more);",
        "share.end = smaller(total, share.begin + share.each + 1);",
    ),
    "sums are read before they are written": (
        "block.warp_sums[thread / kWarpSize] = upto;\n  __syncthreads();",
        "block.warp_sums[thread / kWarpSize] = upto;",
    ),
    "a share is used before it is known": (
        "block.share = share;\n  __syncthreads();",
        "block.share = share;",
    ),
    "a tile too few for the row": (
        "(length + kTileTokens - 1) / kTileTokens));",
        "length / kTileTokens));",
    ),
    "what the block shares is overwritten early": (
        "    more = next < share.end;\n    __syncthreads();  "
        "// all are done with what the block shares\n",
        "    more = next < share.end;\n",
    ),
    "the next request is read before it is written": (
        "block.its_first_tile = next;\n    }\n    __syncthreads();\n  }",
        "block.its_first_tile = next;\n    }\n  }",
    ),
    "requests of the first threads only": (
        "smaller(first + per_thread, batch);",
        "smaller(first + 1, batch);",
    ),
}
