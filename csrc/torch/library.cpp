// Registers the operators with torch: their schemas, and one body (csrc/host) for all devices.
#include "host/bookkeeping.h"
#include "host/correction.h"
#include "host/drafting.h"
#include "host/merging.h"
#include "host/store.h"
#include "schemas.h"
#include "torch/torch_call.h"

namespace ngram_npu::torch_side {
namespace {

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

// One implementation for all devices: backends.h selects the kernel.
#define NGRAM_NPU_IMPL(op) m.impl(#op, TORCH_BOX(&host::op<TorchCall>));
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m){NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)} STABLE_TORCH_LIBRARY_IMPL(ngram_npu,
                                                                                                            CUDA, m){
    NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)} STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) {
  NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)
}

}  // namespace
}  // namespace ngram_npu::torch_side
