// How the plan of a launch divides the work: decided on the host (plans.h), followed by the kernels. No
// functions, because the AscendC compiler lets host and device code call only their own.
#pragma once

#include <cstdint>

namespace ngram_npu::ascendc {

// Items dealt out to the cores in passes of neighbours, so that what a pass writes is one piece of memory: pass q of
// core c starts at item (q * cores + c) * per_pass.
struct Shares {
  int64_t per_pass;
  int64_t cores;  // 0 where there are no items
};

// Operators that write an item a request and an item a token.
struct BatchTiling {
  Shares requests;
  Shares tokens;
};

// prepare_input_ids_ writes pieces of so many input ids, and waits once for so many pieces.
constexpr int64_t kInputPiece = 16;
constexpr int64_t kInputPieces = 32;

// Of an array that is indexed anywhere: up to so many items are in the unified buffer, all of them.
constexpr int64_t kWhole = 2048;
// What prepare_inputs has of the batch at a time.
constexpr int64_t kStretch = 1024;
// Requests whose counts correct_spec_state_ corrects at once for a pass of tokens.
constexpr int64_t kCorrected = 128;

// The lookup. The ends of each row are `spans` equal pieces, an item each; a core reads an item in tiles, and leaves
// its best match for a second launch, which deals out the requests. Or a row is one item, its core drafts at once, and
// `items` are the requests.
struct LookupTiling {
  int64_t launches;
  int64_t spans;  // items a row
  Shares items;
  int64_t tile_tokens;  // a multiple of kTileUnit; kHalo of them belong to the tile before
  Shares requests;
};

// Matches are marked in bits, and whole 32-byte blocks of them: 8 words of 32 tokens.
constexpr int64_t kTileUnit = 256;
// A match of max_n tokens that ends at a tile's first end begins at most this far before it.
constexpr int64_t kHalo = 64;
// Pieces and tiles of a row begin at 512 bytes from its begin, or multiples.
constexpr int64_t kTileStep = 128;
// Shorter spans would read the halo for too few tokens.
constexpr int64_t kMinSpan = 1024;
// Buffers of a tile's tokens: while one is searched, two are on their way.
constexpr int64_t kTileBuffers = 3;
// What launch 1 leaves of an item for launch 2, in int32s: length and end of its best match, and nothing.
constexpr int64_t kMatchInts = 8;
// Requests that a pass drafts for, at most.
constexpr int64_t kMaxDrafting = 32;
// Room for a request's sampled tokens, and for one length, on their way to its row: whole 32-byte units.
constexpr int64_t kTokenPlace = 72;
constexpr int64_t kLengthPlace = 8;

}  // namespace ngram_npu::ascendc
