// Registers the operators with torch: their schemas, and one implementation per operator (csrc/api) for all devices.
#include <pybind11/detail/common.h>

#include <array>
#include <deque>
#include <utility>

#include "api/bookkeeping.h"
#include "api/call.h"
#include "api/device_store.h"
#include "api/drafting.h"
#include "api/store.h"
#include "api/torch/torch_call.h"
#include "schemas.h"

namespace ngram_npu::torch_api {
namespace {

// The kernels of an operator of the table. Operators that share a kernel share the object.
const Operator& kernels_of(size_t index) {
  static std::deque<Operator> kernels;
  static const std::vector<const Operator*> by_operator = [] {
    std::vector<const Operator*> found;
    for (const api::Operator& op : api::operators()) {
      auto kernel = kernels.begin();
      while (kernel != kernels.end() && std::string_view(kernel->name()) != op.kernel) ++kernel;
      found.push_back(kernel != kernels.end() ? &*kernel : &kernels.emplace_back(op.kernel));
    }
    return found;
  }();
  return *by_operator[index];
}

class TorchFrontEnd final : public api::FrontEnd {
 public:
  // New tensors are on the device of `like`.
  TorchFrontEnd(const Operator& kernels, const Tensor& like, const api::Device& device)
      : kernels_(kernels), like_(like), device_(device) {}

  void* allocate_result(size_t index, api::DType dtype, const int64_t* sizes, int32_t rank) override {
    return results_[index].emplace(empty_on_device_of(like_, sizes, rank, dtype)).mutable_data_ptr();
  }

  void* prepare_workspace(const api::Arguments& call, const void* params, const api::TensorView* workspace) override {
    const int64_t words = kernels_.workspace_words(device_, params);
    if (words == 0) return nullptr;
    if (workspace != nullptr) {
      call.check_workspace_size(*workspace, words);
      return workspace->data;
    }
    workspace_ = empty_on_device_of(like_, &words, 1, api::DType::kInt32);
    torch::stable::zero_(*workspace_);
    return workspace_->mutable_data_ptr();
  }

  Executor executor() const override { return torch_executor(); }
  void run(const void* params) override { kernels_.call(device_, params); }

  const Tensor& result(size_t index) const { return *results_[index]; }

 private:
  const Operator& kernels_;
  const Tensor& like_;
  const api::Device device_;
  std::array<std::optional<Tensor>, 5> results_;
  // The tensor is freed as soon as the kernel is enqueued, which is safe because torch's allocators are stream-ordered.
  std::optional<Tensor> workspace_;
};

// Calls an operator with the arguments on the stack, and replaces them by its results.
void call_operator(size_t index, StableIValue* stack) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const api::Operator& op = api::operators()[index];
  std::array<std::optional<Tensor>, api::kMaxArguments> tensors;
  std::array<api::Value, api::kMaxArguments> values;
  size_t first = api::kMaxArguments;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const api::OperatorArgument& argument = op.arguments[i];
    if (argument.kind == api::OperatorArgument::kInt) {
      values[i].scalar = to<int64_t>(stack[i]);
    } else if (argument.kind == api::OperatorArgument::kBool) {
      values[i].scalar = to<bool>(stack[i]) ? 1 : 0;
    } else {
      tensors[i] = argument.is_optional ? to<std::optional<Tensor>>(stack[i]) : to<Tensor>(stack[i]);
      if (tensors[i]) first = smaller(first, i);
    }
  }
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!tensors[i]) continue;
    values[i].tensor = view_of(*tensors[i]);
    values[i].tensor.name = op.arguments[i].name.c_str();
    values[i].is_present = true;
  }
  TorchFrontEnd front_end(kernels_of(index), *tensors[first], values[first].tensor.device);
  op.call(op, values.data(), front_end);
  for (size_t i = 0; i < op.results.size(); ++i) stack[i] = from(front_end.result(i));
}

// Calls an operator, and converts its argument errors to Python's ValueError. Up to torch 2.14, pybind11 converts a
// standard exception by its type. From 2.15 on, torch first converts the exception to RuntimeError, unless it is an
// exception of pybind11.
template <size_t kIndex>
void call_boxed(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  try {
    call_operator(kIndex, stack);
  } catch (const api::ArgumentError& error) {
    throw pybind11::value_error(error.what());
  }
}
template <auto boxed>
void call_with_value_errors(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  try {
    boxed(stack, num_args, num_outputs);
  } catch (const api::ArgumentError& error) {
    throw pybind11::value_error(error.what());
  }
}

// All devices have the same implementation, which calls the kernel that backends.h finds.
template <size_t... kIndices>
void define_implementations(torch::stable::detail::StableLibrary& m, std::index_sequence<kIndices...>) {
  (m.impl(api::operators()[kIndices].name, &call_boxed<kIndices>), ...);
}
#define NGRAM_NPU_IMPL(op) m.impl(#op, &call_with_value_errors<TORCH_BOX(&api::op<TorchCall>)>);
void define_old(torch::stable::detail::StableLibrary& m){NGRAM_NPU_OLD_OPERATORS(NGRAM_NPU_IMPL)}
#define NGRAM_NPU_COUNT(op, kernel) +1
constexpr size_t kNumOperators = NGRAM_NPU_OPERATORS(NGRAM_NPU_COUNT);

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  kernels_of(0);  // creates the kernels, before a backend is loaded
  for (const api::Operator& op : api::operators()) m.def(op.schema.c_str());
  for (const char* schema : kSchemas) m.def(schema);
}
// clang-format off
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m) { define_implementations(m, std::make_index_sequence<kNumOperators>()); define_old(m); }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CUDA, m) { define_implementations(m, std::make_index_sequence<kNumOperators>()); define_old(m); }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) { define_implementations(m, std::make_index_sequence<kNumOperators>()); define_old(m); }  // clang-format on

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

Tensor empty_on_device_of(const Tensor& like, const int64_t* sizes, int32_t rank, api::DType dtype) {
  int32_t type = 0;
  int32_t index = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  const int64_t strides[api::TensorView::kMaxDim] = {rank == 2 && sizes[1] > 0 ? sizes[1] : 1, 1};
  const int32_t code = dtype == api::DType::kInt64 ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32();
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, sizes, strides, code, type, index, &handle));
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
