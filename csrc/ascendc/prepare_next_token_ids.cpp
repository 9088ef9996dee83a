#include "core/prepare_next_token_ids.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// The rows of sampled tokens of a pass of requests, each at a multiple of 32 bytes.
class SampledRows {
 public:
  struct Row {
    const Local<int32_t>& rows;
    int64_t at;
    __aicore__ inline int32_t operator[](int64_t t) const { return rows.get(at + t); }
  };

  __aicore__ inline SampledRows(AscendC::TPipe& pipe, int64_t per_pass) : rows_(pipe, per_pass * kTokenPlace) {}

  __aicore__ inline void load(const TokenRows<const int32_t>& sampled, int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; ++j) rows_.load(j * kTokenPlace, sampled[first + j], sampled.capacity);
  }
  __aicore__ inline Row operator[](int64_t j) const { return {rows_, j * kTokenPlace}; }

 private:
  Local<int32_t> rows_;
};

__aicore__ inline void prepare_next_token_ids_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareNextTokenIdsParams>(args.params);
  const auto share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  SampledRows sampled(pipe, share.per_pass);
  InUb<uint8_t> discard(pipe, p.discard, share.per_pass);
  Local<int32_t> tokens(pipe, share.per_pass);
  Local<int32_t> num_sampled(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    order<AscendC::HardEvent::S_MTE2>();
    sampled.load(p.sampled_token_ids, first, count);
    if (p.discard != nullptr) discard.load(first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const bool discarded = p.discard != nullptr && discard[first + j] != 0;
      const NextToken next = next_token(p, first + j, sampled[j], discarded);
      tokens.set(j, next.token);
      num_sampled.set(j, next.num_sampled);
    }
    order<AscendC::HardEvent::S_MTE3>();
    tokens.store(0, p.next_token_ids + first, count);
    num_sampled.store(0, p.num_sampled + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_prepare_next_token_ids(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_next_token_ids_kernel(args);
}
