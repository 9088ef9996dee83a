// Registers the operators with torch: their schemas, and one body (csrc/api) for all devices.
#include <pybind11/detail/common.h>

#include "api/bookkeeping.h"
#include "api/correction.h"
#include "api/drafting.h"
#include "api/merging.h"
#include "api/store.h"
#include "api/torch/torch_call.h"
#include "schemas.h"

namespace ngram_npu::torch_side {
namespace {

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

// A boxed operator whose argument errors are Python's ValueError with every torch. Up to 2.14, pybind11 converts a
// standard exception by its type. From 2.15 on, torch converts it before, to RuntimeError, and leaves those of
// pybind11.
template <auto boxed>
void with_value_errors(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  try {
    boxed(stack, num_args, num_outputs);
  } catch (const api::ArgumentError& error) {
    throw pybind11::value_error(error.what());
  }
}

// One implementation for all devices: backends.h selects the kernel.
#define NGRAM_NPU_IMPL(op) m.impl(#op, &with_value_errors<TORCH_BOX(&api::op<TorchCall>)>);
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m){NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)} STABLE_TORCH_LIBRARY_IMPL(ngram_npu,
                                                                                                            CUDA, m){
    NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)} STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) {
  NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL)
}

}  // namespace
}  // namespace ngram_npu::torch_side
