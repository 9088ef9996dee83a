#include "core/ngram_index_step.h"

#include "cpu/step_row.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const NgramIndexStepParams* params, void*) {
  const NgramIndexStepParams& p = *params;
  cpu::StepDrafter(p.step, p.index, p.catch_up_tokens, p.ladder, {}).run();
  return kOk;
}
