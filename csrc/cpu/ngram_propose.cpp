#include "core/ngram_propose.h"

#include "cpu/propose_row.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const NgramProposeParams* params, void*) {
  cpu::ProposeDrafter(*params).run();
  return kOk;
}
