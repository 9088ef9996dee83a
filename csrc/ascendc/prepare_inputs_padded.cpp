#include "core/prepare_inputs_padded.h"

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

// The inputs of PrepareInputsPaddedParams for a pass of requests, under their names.
struct StagedBatch {
  InUb<int32_t> cu_num_draft_tokens, num_sampled, query_start_loc;

  __aicore__ inline void load(int64_t first, int64_t count) {
    const int64_t before = first > 0 ? 1 : 0;
    cu_num_draft_tokens.load(first - before, count + before);
    num_sampled.load(first, count);
    query_start_loc.load(first, count + 1);
  }
};

__aicore__ inline void prepare_inputs_padded_kernel(const NgramNpuLaunchArgs& args) {
  const auto p = read_as<PrepareInputsPaddedParams>(args.params);
  const Shares share = read_as<Shares>(args.tiling);
  AscendC::TPipe pipe;
  StagedBatch batch{{pipe, p.cu_num_draft_tokens, share.per_pass + 1},
                    {pipe, p.num_sampled, share.per_pass},
                    {pipe, p.query_start_loc, share.per_pass + 1}};
  Local<int32_t> indices(pipe, share.per_pass);
  Local<int32_t> rejected(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    order<AscendC::HardEvent::S_MTE2>();
    batch.load(first, count);
    order<AscendC::HardEvent::MTE2_S>();
    for (int64_t j = 0; j < count; ++j) {
      const int32_t drafts_rejected = rejected_of(batch, first + j);
      rejected.set(j, drafts_rejected);
      indices.set(j, index_to_sample(batch, first + j, drafts_rejected));
    }
    order<AscendC::HardEvent::S_MTE3>();
    rejected.store(0, p.num_rejected + first, count);
    indices.store(0, p.token_indices_to_sample + first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}

}  // namespace ngram_npu::ascendc

extern "C" __global__ __aicore__ void ngram_npu_prepare_inputs_padded(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  ngram_npu::ascendc::prepare_inputs_padded_kernel(args);
}
