// The numpy front end: passes arrays to the operator implementations (csrc/api/arguments.h) without a copy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "api/arguments.h"
#include "cpu/machine.h"

namespace ngram_npu::numpy {

namespace py = pybind11;

inline api::DType dtype_of(const py::dtype& dtype) {
  if (dtype.byteorder() == '>') return api::DType::kOther;  // all supported machines are little-endian
  struct DTypeEntry {
    char kind;
    py::ssize_t bytes;
    api::DType dtype;
  };
  using api::DType;
  static constexpr DTypeEntry kDTypes[] = {
      {'i', 4, DType::kInt32},  {'i', 8, DType::kInt64},   {'b', 1, DType::kBool},    {'i', 1, DType::kInt8},
      {'i', 2, DType::kInt16},  {'u', 1, DType::kUInt8},   {'u', 2, DType::kUInt16},  {'u', 4, DType::kUInt32},
      {'u', 8, DType::kUInt64}, {'f', 2, DType::kFloat16}, {'f', 4, DType::kFloat32}, {'f', 8, DType::kFloat64},
  };
  for (const DTypeEntry& entry : kDTypes) {
    if (entry.kind == dtype.kind() && entry.bytes == dtype.itemsize()) return entry.dtype;
  }
  return DType::kOther;
}

// Adds functions for rows to the module _C.
void define_row_tools(py::module_& m);

class NumpyCall : public api::Arguments {
 public:
  using In = py::handle;
  using Optional = const py::object&;  // may be None
  using Output = py::array_t<int32_t>;
  using Arguments::Arguments;

  api::TensorView view(const char* name, py::handle object) const { return view_array(name, object, "a numpy array"); }
  std::optional<api::TensorView> view(const char* name, const py::object& object) const {
    if (object.is_none()) return std::nullopt;
    return view_array(name, object, "a numpy array or None");
  }

  // Creates the array with numpy's C API, because numpy.empty would take long compared with a whole call (about 1 us).
  static Output empty(int64_t size) { return Output(size); }
  static Output empty(int64_t rows, int64_t columns) { return Output({rows, columns}); }
  static int32_t* data(Output& output) { return output.mutable_data(); }
  static py::array empty_tokens(int64_t item_bytes, int64_t rows, int64_t columns) {
    if (item_bytes == 8) return py::array_t<int64_t>({rows, columns});
    return empty(rows, columns);
  }
  static void* tokens(py::array& output) { return output.mutable_data(); }

  struct NoWorkspace {
    static void* data() { return nullptr; }
  };
  template <class Op>
  static NoWorkspace workspace(const typename Op::Params&, const std::optional<api::TensorView>&) {
    return {};
  }

  // Runs the kernel without the GIL. After the checks, a kernel can fail only because of missing memory.
  template <class Op>
  static void run(const typename Op::Params& params) {
    int32_t status = kOk;
    {
      const py::gil_scoped_release gil_released;
      status = Op::kCpuKernel(&params, nullptr);
    }
    if (status != kOk) {
      throw std::runtime_error(std::string(Op::kName) + ": the kernel failed: " + api::describe_status(status));
    }
  }

  template <class... Outputs>
  static py::tuple results(Outputs&... outputs) {
    return py::make_tuple(std::move(outputs)...);
  }

  static Executor executor() { return cpu::pool_executor(); }

 private:
  api::TensorView view_array(const char* name, py::handle object, const char* expected) const;
};

inline api::TensorView NumpyCall::view_array(const char* name, py::handle object, const char* expected) const {
  if (!py::isinstance<py::array>(object)) fail(name, expected, Py_TYPE(object.ptr())->tp_name);
  const auto array = py::reinterpret_borrow<py::array>(object);
  api::TensorView view;
  view.name = name;
  view.dtype = dtype_of(array.dtype());
  view.item_bytes = array.itemsize();
  view.ndim = static_cast<int32_t>(array.ndim());
  view.data = const_cast<void*>(array.data());
  if (view.item_bytes == 0) return view;  // a record type without fields has dtype kOther, which all checks reject
  view.writable = array.writeable();
  view.aligned = reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(view.item_bytes) == 0;
  for (int32_t d = 0; d < view.ndim && d < api::TensorView::kMaxDim; ++d) {
    view.sizes[d] = array.shape(d);
    view.strides[d] = array.strides(d) / view.item_bytes;
    view.aligned = view.aligned && array.strides(d) % view.item_bytes == 0;
  }
  return view;
}

}  // namespace ngram_npu::numpy
