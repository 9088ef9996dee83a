#include "core/prepare_inputs.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// The numbers of tokens that each request of a stretch keeps and drops: a vector version of kept_tokens().
class KeptStretch {
 public:
  __aicore__ inline explicit KeptStretch(AscendC::TPipe& pipe)
      : starts_(pipe, kStretch), kept_(pipe, kStretch), rejected_(pipe, kStretch) {}

  __aicore__ inline void load(const PrepareInputsParams& p, int64_t first) {
    first_ = first;
    const int64_t count = smaller(kStretch, p.batch - first);
    if (count <= 0) return;
    if (first > 0) order<AscendC::HardEvent::S_MTE2>();
    starts_.load(0, p.query_start_loc + first, count);
    kept_.load(0, p.query_start_loc + first + 1, count);  // the requests' ends
    rejected_.load(0, p.num_rejected + first, count);
    order<AscendC::HardEvent::MTE2_V>();
    const auto& kept = kept_.tensor();
    const auto& rejected = rejected_.tensor();
    const auto n = static_cast<int32_t>(count);
    AscendC::Sub(kept, kept, starts_.tensor(), n);
    AscendC::Maxs(kept, kept, 0, n);
    AscendC::Maxs(rejected, rejected, 0, n);
    AscendC::Min(rejected, rejected, kept, n);
    AscendC::Sub(kept, kept, rejected, n);
    order<AscendC::HardEvent::V_S>();
  }

  __aicore__ inline bool has(int64_t i) const { return i < first_ + kStretch; }
  __aicore__ inline int32_t start(int64_t i) const { return starts_.get(i - first_); }
  __aicore__ inline int32_t kept(int64_t i) const { return kept_.get(i - first_); }
  __aicore__ inline int32_t rejected(int64_t i) const { return rejected_.get(i - first_); }
  // The tokens that requests i and i + 1 keep together, read with one load; i is even.
  __aicore__ inline int64_t kept_by_two(int64_t i) const {
    const auto pairs = kept_.tensor().ReinterpretCast<uint64_t>();
    const uint64_t both = pairs.GetValue(static_cast<uint32_t>((i - first_) / 2));
    return static_cast<int64_t>((both & UINT32_MAX) + (both >> 32));
  }

 private:
  Local<int32_t> starts_, kept_, rejected_;
  int64_t first_ = 0;
};

// Items [begin, end) of a pass, staged.
struct Pass {
  int64_t begin, end;

  __aicore__ inline Pass(const Shares& share, int64_t first, int64_t size)
      : begin(smaller(first, size)), end(smaller(begin + share.per_pass, size)) {}
  __aicore__ inline bool has(int64_t i) const { return begin <= i && i < end; }
  // Whether none of the items [first, last) is one of the pass's.
  __aicore__ inline bool lacks(int64_t first, int64_t last) const { return last <= begin || end <= first; }
};

// The place of a request's kept tokens depends on all earlier requests. So every core counts the kept tokens up to its
// own part of query_start_loc_out, whose last item is not a request, and up to its own part of token_indices.
__aicore__ inline void prepare_inputs_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsParams>(args.params);
  const auto tiling = read_as<BatchTiling>(args.tiling);
  AscendC::TPipe pipe;
  KeptStretch stretch(pipe);
  InUb<int32_t> seq_lens(pipe, p.seq_lens, tiling.requests.per_pass);
  Local<int32_t> starts(pipe, tiling.requests.per_pass);
  Local<int32_t> lengths(pipe, tiling.requests.per_pass);
  Local<int32_t> indices(pipe, larger<int64_t>(tiling.tokens.per_pass, 1));
  int64_t request = first_item(tiling.requests);
  int64_t token = first_item(tiling.tokens);
  while (request <= p.batch || token < p.total_tokens) {
    const Pass own(tiling.requests, request, p.batch + 1);
    const Pass tokens(tiling.tokens, token, p.total_tokens);
    order<AscendC::HardEvent::S_MTE2>();
    seq_lens.load(own.begin, smaller(own.end, p.batch) - own.begin);
    stretch.load(p, 0);
    int32_t kept_before = 0;
    int64_t written = 0;
    for (int64_t i = 0; i < p.batch && (i < own.end || written < tokens.end); ++i) {
      if (!stretch.has(i)) stretch.load(p, i);
      if (i % 2 == 0 && i + 1 < p.batch && own.lacks(i, i + 2)) {
        const int64_t both = stretch.kept_by_two(i);
        if (tokens.lacks(written, written + both)) {
          kept_before = wrap_add(kept_before, static_cast<int32_t>(both));
          written += both;
          ++i;
          continue;
        }
      }
      const int32_t kept = stretch.kept(i);
      if (own.has(i)) {
        starts.set(i - own.begin, kept_before);
        lengths.set(i - own.begin, wrap_sub(seq_lens[i], stretch.rejected(i)));
      }
      const int64_t upto = smaller(tokens.end, written + kept);
      for (int64_t n = larger(tokens.begin, written); n < upto; ++n) {
        indices.set(n - tokens.begin, wrap_add(stretch.start(i), static_cast<int32_t>(n - written)));
      }
      kept_before = wrap_add(kept_before, kept);
      written += kept;
    }
    if (own.has(p.batch)) starts.set(p.batch - own.begin, kept_before);
    for (int64_t n = larger(tokens.begin, written); n < tokens.end; ++n) indices.set(n - tokens.begin, kNoToken);
    order<AscendC::HardEvent::S_MTE3>();
    starts.store(0, p.query_start_loc_out + own.begin, own.end - own.begin);
    lengths.store(0, p.seq_lens_out + own.begin, smaller(own.end, p.batch) - own.begin);
    indices.store(0, p.token_indices + tokens.begin, tokens.end - tokens.begin);
    order<AscendC::HardEvent::MTE3_S>();
    if (request <= p.batch) request += items_between(tiling.requests);
    if (token < p.total_tokens) token += items_between(tiling.tokens);
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_inputs_kernel(args);
}
