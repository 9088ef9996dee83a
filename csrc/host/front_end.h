// What an operator's body (in the other headers of this folder) needs of a front end F, torch's or numpy's, besides
// being the Arguments of one call:
//   In, Optional            an argument as the caller gave it; one that may be absent
//   Output                  a new int32 tensor, on the device of the first argument
//   view operator()(name, In), optional view operator()(name, Optional)
//   Output empty(sizes...), int32_t* data(Output&)
//   empty_tokens(item_bytes, rows, columns), void* tokens(...)   the same of ids that may be int64
//   workspace<Op>(params, given)   memory that Op's kernel needs besides, its data() null where it needs none
//   run<Op>(params)         Op's kernel for the device
//   results(Output&...)     what the caller gets
//   static Executor executor()
#pragma once

#include "host/arguments.h"

namespace ngram_npu::host {

template <class F>
using In = typename F::In;
template <class F>
using Optional = typename F::Optional;

// `op`_op: an operator's name, parameters and CPU kernel.
#define NGRAM_NPU_OPERATOR(op, OpParams)                               \
  NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_##op(const OpParams*, void*); \
  struct op##_op {                                                     \
    using Params = OpParams;                                           \
    static constexpr const char* kName = #op;                          \
    static constexpr auto kCpuKernel = ngram_npu_cpu_##op;             \
  };

}  // namespace ngram_npu::host
