// Registers the operators with torch: their schemas, and one implementation per operator (csrc/api) for all devices.
#include <pybind11/detail/common.h>

#include "api/bookkeeping.h"
#include "api/correction.h"
#include "api/drafting.h"
#include "api/merging.h"
#include "api/store.h"
#include "api/torch/torch_call.h"
#include "schemas.h"

namespace ngram_npu::torch_api {
namespace {

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  for (const char* schema : kSchemas) m.def(schema);
}

// Calls a boxed operator and converts its argument errors to Python's ValueError. Up to torch 2.14, pybind11 converts a
// standard exception by its type. From 2.15 on, torch first converts the exception to RuntimeError, unless it is an
// exception of pybind11.
template <auto boxed>
void call_with_value_errors(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  try {
    boxed(stack, num_args, num_outputs);
  } catch (const api::ArgumentError& error) {
    throw pybind11::value_error(error.what());
  }
}

// All devices have the same implementation, which calls the kernel that backends.h finds.
#define NGRAM_NPU_IMPL(op) m.impl(#op, &call_with_value_errors<TORCH_BOX(&api::op<TorchCall>)>);
// clang-format off
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m) { NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL) }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CUDA, m) { NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL) }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) { NGRAM_NPU_OPERATORS(NGRAM_NPU_IMPL) }  // clang-format on

api::DType dtype_of(int32_t code) {
  struct DTypeEntry {
    int32_t code;
    api::DType dtype;
  };
  using api::DType;
  static const DTypeEntry kDTypes[] = {
      {aoti_torch_dtype_int32(), DType::kInt32},       {aoti_torch_dtype_int64(), DType::kInt64},
      {aoti_torch_dtype_bool(), DType::kBool},         {aoti_torch_dtype_int8(), DType::kInt8},
      {aoti_torch_dtype_int16(), DType::kInt16},       {aoti_torch_dtype_uint8(), DType::kUInt8},
      {aoti_torch_dtype_uint16(), DType::kUInt16},     {aoti_torch_dtype_uint32(), DType::kUInt32},
      {aoti_torch_dtype_uint64(), DType::kUInt64},     {aoti_torch_dtype_float16(), DType::kFloat16},
      {aoti_torch_dtype_float32(), DType::kFloat32},   {aoti_torch_dtype_float64(), DType::kFloat64},
      {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
  };
  for (const DTypeEntry& entry : kDTypes) {
    if (entry.code == code) return entry.dtype;
  }
  return DType::kOther;
}

}  // namespace

api::TensorView view_of(const Tensor& tensor) {
  api::TensorView view;
  if (!tensor.defined()) {
    view.dtype = api::DType::kNone;
    return view;
  }
  AtenTensorHandle handle = tensor.get();
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
  view.dtype = dtype_of(dtype);
  view.item_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &view.device.type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device.index));
  view.ndim = static_cast<int32_t>(tensor.dim());
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  for (int32_t d = 0; d < view.ndim && d < api::TensorView::kMaxDim; ++d) {
    view.sizes[d] = sizes[d];
    view.strides[d] = strides[d];
  }
  view.data = tensor.data_ptr();
  view.aligned = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(view.item_bytes) == 0;
  return view;
}

Tensor empty_on_device_of(const Tensor& like, std::initializer_list<int64_t> sizes, int64_t item_bytes) {
  int32_t type = 0;
  int32_t index = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  int64_t strides[api::TensorView::kMaxDim] = {};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes.begin()[d] > 0 ? sizes.begin()[d] : 1;
  }
  const int32_t dtype = item_bytes == 8 ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32();
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                                                         dtype, type, index, &handle));
  return Tensor(handle);
}

Executor torch_executor() {
  // Two threads become faster than one at 128k to 256k tokens in total, whether or not the pool is idle
  // (docs/design/cpu.md). With 128k tokens per thread, two threads are used from 256k tokens.
  constexpr int64_t kMinTokensPerThread = int64_t{1} << 17;
  const auto run = [](const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
    torch::stable::parallel_for(0, num_tasks, 1, [fn, context](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) fn(context, static_cast<int32_t>(task));
    });
  };
  return {run, static_cast<int32_t>(torch::stable::get_num_threads()), kMinTokensPerThread, nullptr};
}

}  // namespace ngram_npu::torch_api
