// A launch's argument, and the division of work that it carries: computed on the host (plans.h), used by the kernels.
// No functions, because the AscendC compiler does not let host and device code share them.
#pragma once

#include <cstdint>

// The argument of every kernel, passed by value. CANN's generator of launch stubs copies the text of this struct into
// files without our headers, so it is plain, in the global namespace, and made of built-in types. Only the host's plan
// (launch_plan.h) and the kernel (device.h) interpret its words.
struct NgramNpuLaunchArgs {
  uint64_t params[48];  // <Op>Params; its pointers are device addresses
  uint64_t tiling[8];   // <Op>Tiling
  uint64_t workspace;   // device address of the workspace; the plan has its size
};

namespace ngram_npu::ascendc {

// Items are assigned to cores in passes of consecutive items, so that a pass writes contiguous memory: pass q of core c
// starts at item (q * cores + c) * per_pass.
struct Shares {
  int64_t per_pass;
  int64_t cores;  // 0 if there are no items
};

// For operators that write one item per request and one per token.
struct BatchTiling {
  Shares requests;
  Shares tokens;
};

// Input ids per piece that prepare_input_ids_ writes, and pieces per wait.
constexpr int64_t kInputPiece = 16;
constexpr int64_t kInputPieces = 32;

// An array with random access is in the unified buffer if it has at most this many items.
constexpr int64_t kWhole = 2048;
// Requests that prepare_inputs stages at a time.
constexpr int64_t kStretch = 1024;
// Requests that correct_spec_state_ corrects at once for a pass of tokens.
constexpr int64_t kCorrected = 128;

// The lookup. The ends of each row are divided into `spans` equal pieces, one item each; a core reads an item in tiles
// and writes its best match for a second launch, which distributes requests. Or a row is one item, its core drafts at
// once, and `items` are the requests.
struct LookupTiling {
  int64_t launches;
  int64_t spans;  // items per row
  Shares items;
  int64_t tile_tokens;  // a multiple of kTileUnit; kHalo of them belong to the tile before
  Shares requests;
};

// Matches are marked in bits, in whole blocks of 32 bytes: 8 words of 32 tokens.
constexpr int64_t kTileUnit = 256;
// A match of max_n tokens that ends at a tile's first end begins at most this far before it.
constexpr int64_t kHalo = 64;
// Pieces and tiles of a row begin at multiples of 512 bytes from its beginning.
constexpr int64_t kTileStep = 128;
// Shorter spans would read the halo for too few tokens.
constexpr int64_t kMinSpan = 1024;
// Buffers for a tile's tokens: while one is searched, two are loaded.
constexpr int64_t kTileBuffers = 3;
// int32s per item from launch 1 to launch 2: length and end of its best match, then padding.
constexpr int64_t kMatchInts = 8;
// Maximum number of requests that a pass drafts for.
constexpr int64_t kMaxDrafting = 32;
// Space for staging a request's sampled tokens and one length: whole 32-byte units.
constexpr int64_t kTokenPlace = 72;
constexpr int64_t kLengthPlace = 8;

}  // namespace ngram_npu::ascendc
