#include "core/ngram_index_append.h"
#include "cuda/ngram_index.cuh"

// Three launches: get the slots ready, enter the grams, note what was entered. The first may empty a slot, and then
// nothing may be entered for it in the same launch; the last must not come before all blocks of a row are done.

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int64_t kChunk = 512;        // ends a block takes at a time
constexpr int64_t kBlocks = 2048;      // some for each row, where they have so many chunks; each then takes several
constexpr int64_t kRowBlocks = 16;     // but a row has that many at least
constexpr uint32_t kGivenUpNow = ~0u;  // a slot's kSlotGivenUp between the second launch and the third

// A batch position as all three kernels see it.
struct Request {
  Table table;
  const int32_t* tokens;  // null: there is nothing to index
  uint32_t slot;
  uint32_t ends;  // to be indexed: all but the last token's, which the next step looks up
};

__device__ Request request_of(const NgramIndexAppendParams& p, int64_t i) {
  Request r{};
  if (i >= p.batch) return r;
  const int64_t row = p.row_indices[i];
  const int64_t slot = p.index.slot_of(i, row);
  if (!p.token_ids.has(row) || p.max_n - p.min_n >= kMaxIndexSpan) return r;
  const int64_t length = p.num_tokens[row];
  if (length < 0 || length > p.token_ids.capacity || length > kMaxIndexedTokens) return r;
  r.table = open_table(p.index.words, p.index.num_words);
  if (!r.table.has(slot)) return r;
  r.tokens = p.token_ids[row];
  r.slot = static_cast<uint32_t>(slot);
  r.ends = static_cast<uint32_t>(larger<int64_t>(length - 1, 0));
  return r;
}

// One warp a request.
__global__ void __launch_bounds__(kThreads)
    ngram_index_prepare_kernel(const __grid_constant__ NgramIndexAppendParams p) {
  const Request r = request_of(p, int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize);
  if (r.tokens == nullptr) return;
  const uint32_t options = pack_options(p.min_n, p.max_n, p.match_policy);
  const SlotState state =
      view_slot(r.table, r.table.slot(r.slot)[lane_id() % kSlotWords], options, r.tokens, r.ends).state;
  __syncwarp();  // all lanes have read what one now writes
  if (lane_id() != 0 || state == SlotState::kUsable || state == SlotState::kGivenUp) return;
  uint32_t* slot = r.table.slot(r.slot);
  if (state > SlotState::kGivenUp) empty_slot(r.table, r.slot, state);
  slot[kSlotOptions] = options;
  slot[kSlotIndexed] = 0;
  slot[kSlotGivenUp] = 0;
}

// blockIdx.x: the request; y: which chunks. A warp enters all grams of one end.
__global__ void __launch_bounds__(kThreads, 3)
    ngram_index_insert_kernel(const __grid_constant__ NgramIndexAppendParams p) {
  const Request r = request_of(p, blockIdx.x);
  if (r.tokens == nullptr) return;
  uint32_t* slot = r.table.slot(r.slot);
  volatile uint32_t* given_up = slot + kSlotGivenUp;
  const uint32_t first = slot[kSlotIndexed];
  const uint32_t tenant = r.table.tenant(r.slot, r.table.generations[r.slot]);
  const SlotGrams mine{r.table, r.tokens, r.slot, tenant, p.match_policy};
  const uint32_t min_n = static_cast<uint32_t>(p.min_n), max_n = static_cast<uint32_t>(p.max_n);
  uint32_t added = 0;
  bool full = false;
  for (int64_t chunk = blockIdx.y; first + chunk * kChunk < r.ends && !full; chunk += gridDim.y) {
    if (__shfl_sync(kWholeWarp, *given_up, 0) != 0) break;
    const int64_t stop = smaller<int64_t>((chunk + 1) * kChunk, int64_t{r.ends} - first);
    for (int64_t at = chunk * kChunk + threadIdx.x / kWarpSize; at < stop && !full; at += kWarps) {
      // Where the latest occurrence counts, the last come first: those before them then have nothing to change.
      const uint32_t end = static_cast<uint32_t>(p.match_policy == kEarliest ? first + at : r.ends - 1 - at);
      GramHash hash = hash_gram(r.tokens, end, smaller(min_n - 1, end));
      for (uint32_t n = min_n; n <= max_n && n <= end + 1 && !full; ++n) {
        hash.take(r.tokens[end + 1 - n]);
        const Place place = place_of(r.table, hash, r.slot, tenant, n - min_n);
        full = !mine.insert(place, end, n, r.ends, &added);
      }
    }
  }
  if (lane_id() != 0) return;
  if (added > 0) {
    atomicAdd(slot + kSlotHeld, added);
    atomicAdd(r.table.header + kHeaderEntries, added);
  }
  if (full) *given_up = kGivenUpNow;
}

// One warp a request.
__global__ void __launch_bounds__(kThreads)
    ngram_index_finish_kernel(const __grid_constant__ NgramIndexAppendParams p) {
  const Request r = request_of(p, int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize);
  if (r.tokens == nullptr) return;
  uint32_t* slot = r.table.slot(r.slot);
  const uint32_t given_up = slot[kSlotGivenUp];
  __syncwarp();
  if (given_up == kGivenUpNow && lane_id() == 0) give_up_slot(r.table, r.slot);
  if (given_up == 0) note_indexed(r.table, r.slot, r.tokens, r.ends);
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_ngram_index_append_(const NgramIndexAppendParams* params, void* stream) {
  const NgramIndexAppendParams& p = *params;
  if (p.batch < 1 || p.batch > INT32_MAX) return kInvalidParams;
  const dim3 by_warp = blocks_for(p.batch, kWarps);
  const int64_t chunks = (p.token_ids.capacity + kChunk - 1) / kChunk;
  const int64_t share = larger(kBlocks / p.batch, kRowBlocks);
  const dim3 by_chunk(static_cast<uint32_t>(p.batch),
                      static_cast<uint32_t>(larger<int64_t>(smaller(chunks, share), 1)));
  int32_t status = launch(ngram_index_prepare_kernel, by_warp, kThreads, stream, p);
  if (status == kOk) status = launch(ngram_index_insert_kernel, by_chunk, kThreads, stream, p);
  if (status == kOk) status = launch(ngram_index_finish_kernel, by_warp, kThreads, stream, p);
  return status;
}

}  // namespace ngram_npu::cuda
