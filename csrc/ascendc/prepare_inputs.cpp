#include "core/prepare_inputs.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// What says how many tokens each request keeps.
struct Kept {
  Sequence query_start_loc, num_rejected;

  __aicore__ inline KeptTokens of(int64_t i) {
    if (!query_start_loc.has(i)) {
      order<AscendC::HardEvent::S_MTE2>();
      query_start_loc.load(i);
      num_rejected.load(i);
      order<AscendC::HardEvent::MTE2_S>();
    }
    return kept_tokens(*this, i);
  }
};

// Where each request's kept tokens begin is known only from all before it, so every core counts those up to its own
// requests, which are the items [first, first + count) of query_start_loc_out; the last of these is no request.
__aicore__ inline void write_requests(const PrepareInputsParams& p, const Shares& share, Kept& kept,
                                      Local<int32_t>& starts, Local<int32_t>& lengths) {
  int32_t kept_before = 0;
  int64_t counted = 0;
  for (int64_t first = first_item(share); first <= p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch + 1 - first);
    for (; counted < first; ++counted) kept_before = wrap_add(kept_before, kept.of(counted).kept);
    for (; counted < first + count; ++counted) {
      starts.set(counted - first, kept_before);
      if (counted == p.batch) continue;
      const KeptTokens tokens = kept.of(counted);
      kept_before = wrap_add(kept_before, tokens.kept);
      lengths.set(counted - first, wrap_sub(p.seq_lens[counted], tokens.rejected));
    }
    order<AscendC::HardEvent::S_MTE3>();
    starts.store(0, p.query_start_loc_out + first, count);
    lengths.store(0, p.seq_lens_out + first, smaller(count, p.batch - first));
    order<AscendC::HardEvent::MTE3_S>();
  }
}

// The same for the kept tokens that fall on the positions [first, first + count) of token_indices.
__aicore__ inline void write_indices(const PrepareInputsParams& p, const Shares& share, Kept& kept,
                                     Local<int32_t>& indices) {
  for (int64_t first = first_item(share); first < p.total_tokens; first += items_between(share)) {
    const int64_t end = first + smaller(share.per_pass, p.total_tokens - first);
    int64_t written = 0;
    for (int64_t i = 0; i < p.batch && written < end; ++i) {
      const int64_t count = kept.of(i).kept;
      const int64_t upto = smaller(end, written + count);
      for (int64_t n = larger(first, written); n < upto; ++n) {
        indices.set(n - first, wrap_add(kept.query_start_loc[i], static_cast<int32_t>(n - written)));
      }
      written += count;
    }
    for (int64_t n = larger(first, written); n < end; ++n) indices.set(n - first, kNoToken);
    order<AscendC::HardEvent::S_MTE3>();
    indices.store(0, p.token_indices + first, end - first);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<PrepareInputsParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  AscendC::TPipe pipe;
  Kept kept{{pipe, p.query_start_loc, p.batch + 1}, {pipe, p.num_rejected, p.batch}};
  Local<int32_t> starts(pipe, tiling.requests.per_pass);
  Local<int32_t> lengths(pipe, tiling.requests.per_pass);
  Local<int32_t> indices(pipe, tiling.tokens.per_pass);
  write_requests(p, tiling.requests, kept, starts, lengths);
  write_indices(p, tiling.tokens, kept, indices);
}
