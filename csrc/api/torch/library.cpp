// Registers the operators with torch: their schemas, and one implementation for all operators and devices.
#include <pybind11/detail/common.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <iterator>
#include <optional>
#include <utility>

#include "api/torch/backends.h"
#include "schemas.h"

namespace ngram_npu::torch_api {
namespace {

using torch::stable::Tensor;

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
  for (int32_t d = 0; d < view.ndim && d < api::Shape::kMaxRank; ++d) {
    view.sizes[d] = sizes[d];
    view.strides[d] = strides[d];
  }
  view.data = tensor.data_ptr();
  view.aligned = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(view.item_bytes) == 0;
  return view;
}

// Returns an uninitialised tensor of int32 or int64 on the device of `like`.
Tensor empty_on_device_of(const Tensor& like, const int64_t* sizes, int32_t rank, api::DType dtype) {
  int32_t type = 0;
  int32_t index = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  const int64_t strides[api::Shape::kMaxRank] = {rank == 2 && sizes[1] > 0 ? sizes[1] : 1, 1};
  const int32_t code = dtype == api::DType::kInt64 ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32();
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, sizes, strides, code, type, index, &handle));
  return Tensor(handle);
}

// Returns an executor that uses torch's thread pool (at::parallel_for) with torch.get_num_threads() threads.
Executor torch_executor() {
  // Two threads become faster than one at 128k to 256k tokens in total, whether or not the pool is idle
  // (docs/design/kernels.md). With 128k tokens per thread, two threads are used from 256k tokens.
  constexpr int64_t kMinTokensPerThread = int64_t{1} << 17;
  const auto run = [](const Executor*, int32_t num_tasks, void (*fn)(void*, int32_t), void* context) {
    torch::stable::parallel_for(0, num_tasks, 1, [fn, context](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) fn(context, static_cast<int32_t>(task));
    });
  };
  return {run, static_cast<int32_t>(torch::stable::get_num_threads()), kMinTokensPerThread, nullptr};
}

class TorchFrontEnd final : public api::FrontEnd {
 public:
  // New tensors are on the device of `like`.
  TorchFrontEnd(const LoadedKernels& kernels, const Tensor& like, const api::Device& device)
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
    return workspace_->mutable_data_ptr();
  }

  Executor executor() const override { return torch_executor(); }
  void run(const void* params) override { kernels_.call(device_, params); }

  // Valid after the call, which allocates every result.
  const Tensor& result(size_t index) const { return *results_[index]; }  // NOLINT(bugprone-unchecked-optional-access)

 private:
  const LoadedKernels& kernels_;
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
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const api::OperatorArgument& argument = op.arguments[i];
    if (argument.kind == api::OperatorArgument::kInt) {
      values[i].scalar = to<int64_t>(stack[i]);
    } else if (argument.kind == api::OperatorArgument::kBool) {
      values[i].scalar = to<bool>(stack[i]) ? 1 : 0;
    } else {
      tensors[i] = argument.is_optional ? to<std::optional<Tensor>>(stack[i]) : to<Tensor>(stack[i]);
    }
  }
  const Tensor* first = nullptr;
  api::Device device;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const std::optional<Tensor>& tensor = tensors[i];
    if (!tensor) continue;
    values[i].tensor = view_of(*tensor);
    values[i].tensor.name = op.arguments[i].name.c_str();
    values[i].is_present = true;
    if (first != nullptr) continue;
    first = &*tensor;
    device = values[i].tensor.device;
  }
  TorchFrontEnd front_end(kernels_of(index), *first, device);
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

template <size_t... kIndices>
void define_implementations(torch::stable::detail::StableLibrary& m, std::index_sequence<kIndices...>) {
  (m.impl(api::operators()[kIndices].name, &call_boxed<kIndices>), ...);
}
#define NGRAM_NPU_NAME(op, kernel) #op,
constexpr const char* kNames[] = {NGRAM_NPU_OPERATORS(NGRAM_NPU_NAME)};
using OperatorIndices = std::make_index_sequence<std::size(kNames)>;

STABLE_TORCH_LIBRARY(ngram_npu, m) {
  for (const api::Operator& op : api::operators()) m.def(op.schema.c_str());
}
// All devices have the same implementation, which calls the kernel that backends.h finds.
// clang-format off
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CPU, m) { define_implementations(m, OperatorIndices()); }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, CUDA, m) { define_implementations(m, OperatorIndices()); }
STABLE_TORCH_LIBRARY_IMPL(ngram_npu, PrivateUse1, m) { define_implementations(m, OperatorIndices()); }  // clang-format on

}  // namespace
}  // namespace ngram_npu::torch_api
