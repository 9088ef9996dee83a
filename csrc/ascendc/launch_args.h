// The argument of the kernels, and the tilings in this argument, which divide the work among cores. The host computes
// the tilings (plans.h). This file contains no functions, because the AscendC compiler does not let host and device
// code share functions.
#pragma once

#include <cstdint>

// The argument of every kernel, passed by value. CANN's generator of launch stubs copies the text of this struct into
// files without our headers, so the struct is in the global namespace and consists of built-in types. Only the host's
// plan (launch_plan.h) and the kernel (device.h) interpret its words.
struct NgramNpuLaunchArgs {
  uint64_t params[48];  // <Op>Params; its pointers are device addresses
  uint64_t tiling[8];   // <Op>Tiling
  uint64_t workspace;   // device address of the workspace; the plan has its size
};

namespace ngram_npu::ascendc {

// Items are assigned to cores in passes of consecutive items, so that a pass writes contiguous memory: pass q of core c
// starts at item (q * cores + c) * per_pass.
struct CoreTiling {
  int64_t per_pass;
  int64_t cores;  // 0 if there are no items
};

// The tiling of operators that write one item per request and one item per token.
struct BatchTiling {
  CoreTiling requests;
  CoreTiling tokens;
};

// prepare_input_ids_: number of input ids per copy, and number of copies that a core starts before it waits for them.
constexpr int64_t kInputIdsPerCopy = 16;
constexpr int64_t kCopiesPerWait = 32;

// Maximum number of items of an array with random access that are staged in the unified buffer.
constexpr int64_t kMaxStagedItems = 2048;
// Number of requests that prepare_inputs stages at a time.
constexpr int64_t kRequestsPerTile = 1024;

// How a lookup is divided, in one or two launches.
// Two launches: the possible end positions of a match in each row are divided into `spans` equal work items. A core
// reads an item in tiles and writes the item's best match; the second launch assigns requests to cores and drafts.
// One launch: each row is one work item, the same core searches and drafts, and `items` equals `requests`.
struct LookupTiling {
  int64_t launches;
  int64_t spans;  // items per row
  CoreTiling items;
  int64_t tile_tokens;  // a multiple of kTileUnit; kHalo of these tokens belong to the previous tile
  CoreTiling requests;
};

// store_append_: the first launch plans the requests on one core. In the others, the new tokens of each request are
// divided into `spans` parts, which are divided among the cores.
struct StoreAppendTiling {
  CoreTiling requests;  // of the first launch
  CoreTiling parts;
  int64_t spans;        // parts per request
  int64_t tile_tokens;  // tokens whose n-grams a core inserts at a time
};

// Maximum numbers of requests that a core plans at a time, of parts that it processes at a time, and of requests that
// it looks up at a time.
constexpr int64_t kMaxPlannedRequests = 64;
constexpr int64_t kMaxParts = 8;
constexpr int64_t kMaxLookups = 16;
constexpr int64_t kMaxTileTokens = 32;
// Minimum number of tokens in a part: a core's first loads take longer than inserting the n-grams of fewer tokens.
constexpr int64_t kMinPartTokens = 16;

// The number of tokens of a tile is a multiple of this number, because matches are marked with one bit per token, in
// whole blocks of 32 bytes: 8 words for 32 tokens each.
constexpr int64_t kTileUnit = 256;
// Number of tokens before a tile that a match ending in the tile may include (>= max_n - 1).
constexpr int64_t kHalo = 64;
// Spans and tiles of a row begin at multiples of 512 bytes from the row's beginning.
constexpr int64_t kTileAlignTokens = 128;
// Minimum number of ends in a span. In shorter spans, the halo would be too large a part of the tokens that are read.
constexpr int64_t kMinSpan = 1024;
// Number of buffers for tiles: while a tile is searched, the next two tiles are loaded.
constexpr int64_t kTileBuffers = 3;
// Number of int32 values per item that launch 1 passes to launch 2: length and end of the best match, then padding.
constexpr int64_t kMatchInts = 8;
// Maximum number of requests for which a pass drafts.
constexpr int64_t kMaxRequestsPerDraftPass = 32;
// int32s between staged rows of sampled tokens, and between staged lengths: whole 32-byte units.
constexpr int64_t kSampledTokensStride = 72;
constexpr int64_t kLengthStride = 8;

}  // namespace ngram_npu::ascendc
