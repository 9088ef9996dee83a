// The interface of a front end F, torch's or numpy's, for the operators' bodies, the other headers here
// but arguments.h. F derives from Arguments; an object is one call.
//   In, Optional            types of an argument, and of one that may be absent
//   Output                  a new int32 tensor, on the device of the first argument
//   view operator()(name, In), optional view operator()(name, Optional)
//   Output empty(sizes...), int32_t* data(Output&)
//   empty_tokens(item_bytes, rows, columns), void* tokens(...)   the same for token ids, int32 or int64
//   workspace<Op>(params, given)   workspace of Op's kernel; its data() is null if the kernel needs none
//   run<Op>(params)         calls Op's kernel for the device
//   results(Output&...)     the caller's return value
//   static Executor executor()
#pragma once

#include "api/arguments.h"

namespace ngram_npu::api {

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

}  // namespace ngram_npu::api
