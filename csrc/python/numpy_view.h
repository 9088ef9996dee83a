// numpy arrays as the argument checks take them, without a copy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "host/arguments.h"

namespace ngram_npu::python {

namespace py = pybind11;

inline host::DType dtype_of(const py::dtype& dtype) {
  if (dtype.byteorder() == '>') return host::DType::kOther;  // every machine we build for is little-endian
  struct Known {
    char kind;
    py::ssize_t bytes;
    host::DType dtype;
  };
  using host::DType;
  static constexpr Known kKnown[] = {
      {'i', 4, DType::kInt32},  {'i', 8, DType::kInt64},   {'b', 1, DType::kBool},    {'i', 1, DType::kInt8},
      {'i', 2, DType::kInt16},  {'u', 1, DType::kUInt8},   {'u', 2, DType::kUInt16},  {'u', 4, DType::kUInt32},
      {'u', 8, DType::kUInt64}, {'f', 2, DType::kFloat16}, {'f', 4, DType::kFloat32}, {'f', 8, DType::kFloat64},
  };
  for (const Known& known : kKnown) {
    if (known.kind == dtype.kind() && known.bytes == dtype.itemsize()) return known.dtype;
  }
  return DType::kOther;
}

// A view of a Python object that must be an array, or (get() is null) None where that is allowed.
class ArrayView {
 public:
  ArrayView(const char* op, const char* name, py::handle object, bool optional = false) {
    if (object.is_none() && optional) return;
    if (!py::isinstance<py::array>(object)) {
      host::Arguments(op).fail(name, optional ? "a numpy array or None" : "a numpy array",
                               Py_TYPE(object.ptr())->tp_name);
    }
    const auto array = py::reinterpret_borrow<py::array>(object);
    present_ = true;
    view_.dtype = dtype_of(array.dtype());
    view_.item_bytes = array.itemsize();
    view_.ndim = static_cast<int32_t>(array.ndim());
    view_.data = const_cast<void*>(array.data());
    if (view_.item_bytes == 0) return;  // an empty record: kOther, which no check accepts
    view_.writable = array.writeable();
    view_.aligned = reinterpret_cast<uintptr_t>(view_.data) % static_cast<uintptr_t>(view_.item_bytes) == 0;
    for (int32_t d = 0; d < view_.ndim && d < host::TensorView::kMaxDim; ++d) {
      view_.sizes[d] = array.shape(d);
      view_.strides[d] = array.strides(d) / view_.item_bytes;
      view_.aligned = view_.aligned && array.strides(d) % view_.item_bytes == 0;
    }
  }

  const host::TensorView& operator*() const { return view_; }
  const host::TensorView* get() const { return present_ ? &view_ : nullptr; }

 private:
  host::TensorView view_;
  bool present_ = false;
};

}  // namespace ngram_npu::python
