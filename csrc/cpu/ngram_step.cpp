#include "core/ngram_step.h"

#include "cpu/step_row.h"

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const NgramStepParams* params, void*) {
  cpu::StepDrafter(*params).run();
  return kOk;
}
