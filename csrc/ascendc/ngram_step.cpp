#include "core/ngram_step.h"

#include "ascendc/lookup.h"

namespace ngram_npu::ascendc {

// Launch 1 leaves the rows as they are and looks up what they will be; launch 2 appends.
__aicore__ inline GrownRow grown_row(const NgramStepParams& p, int64_t i, const Accepted& a) {
  const int64_t length = a.old_length + a.num_appended;
  if (!drafts(a) || !may_draft(length, p.token_ids.capacity, p.lookup)) return {};
  return {p.token_ids[a.row], a.old_length, p.sampled_token_ids[i], length};
}
template <>
__aicore__ inline GrownRow grown_row(const NgramStepParams& p, int64_t i) {
  return grown_row(p, i, accept(p, i));
}

// The tokens and the length that a request's row gets, each in a 32-byte place of its own on the way out.
class Appender {
 public:
  __aicore__ inline Appender(AscendC::TPipe& pipe, int64_t per_pass)
      : tokens_(pipe, per_pass * kTokenPlace), lengths_(pipe, per_pass * kLengthPlace) {}

  __aicore__ inline void append(const NgramStepParams& p, int64_t i, int64_t j, const Accepted& a) {
    if (a.num_appended <= 0) return;
    for (int64_t t = 0; t < a.num_appended; ++t) tokens_.set(j * kTokenPlace + t, p.sampled_token_ids[i][t]);
    lengths_.set(j * kLengthPlace, static_cast<int32_t>(a.old_length + a.num_appended));
    order<AscendC::HardEvent::S_MTE3>();
    tokens_.store(j * kTokenPlace, p.token_ids[a.row] + a.old_length, a.num_appended);
    if (p.advance) lengths_.store(j * kLengthPlace, p.num_tokens + a.row, 1);
  }

 private:
  Local<int32_t> tokens_, lengths_;
};

}  // namespace ngram_npu::ascendc

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

extern "C" __global__ __aicore__ void ngram_npu_ngram_step_search(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  search_items<NgramStepParams>(args);
}

extern "C" __global__ __aicore__ void ngram_npu_ngram_step_draft(NgramNpuLaunchArgs args) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const auto p = read_as<NgramStepParams>(args.params);
  const auto tiling = read_as<LookupTiling>(args.tiling);
  const Shares& share = tiling.requests;
  AscendC::TPipe pipe;
  Drafter drafter(pipe, tiling, p.lookup);
  Appender appender(pipe, share.per_pass);
  Local<int32_t> next_tokens(pipe, share.per_pass);
  Local<int32_t> num_sampled(pipe, share.per_pass);
  for (int64_t first = first_item(share); first < p.batch; first += items_between(share)) {
    const int64_t count = smaller(share.per_pass, p.batch - first);
    drafter.load(args.workspace, first, count);
    for (int64_t j = 0; j < count; ++j) {
      const Accepted a = accept(p, first + j);
      next_tokens.set(j, a.next_token);
      num_sampled.set(j, static_cast<int32_t>(a.num_sampled));
      drafter.draft(j, grown_row(p, first + j, a), unused_token(p, first + j));
      appender.append(p, first + j, j, a);
    }
    order<AscendC::HardEvent::S_MTE3>();
    next_tokens.store(0, p.next_token_ids + first, count);
    num_sampled.store(0, p.num_sampled + first, count);
    drafter.store(p, first, count);
    order<AscendC::HardEvent::MTE3_S>();
  }
}
