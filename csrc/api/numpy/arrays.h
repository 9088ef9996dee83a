// numpy arrays as arguments, without a copy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "api/arguments.h"

namespace ngram_npu::numpy {

namespace py = pybind11;

// These functions add members to the module _C.
void define_operators(py::module_& m);
void define_row_tools(py::module_& m);

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

// Returns the properties of an array. `expected` describes what the function accepts.
inline api::TensorView view_array(const api::Arguments& call, const char* name, py::handle object,
                                  const char* expected = "a numpy array") {
  if (!py::isinstance<py::array>(object)) call.fail(name, expected, Py_TYPE(object.ptr())->tp_name);
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
  for (int32_t d = 0; d < view.ndim && d < api::Shape::kMaxRank; ++d) {
    view.sizes[d] = array.shape(d);
    view.strides[d] = array.strides(d) / view.item_bytes;
    view.aligned = view.aligned && array.strides(d) % view.item_bytes == 0;
  }
  return view;
}

}  // namespace ngram_npu::numpy
