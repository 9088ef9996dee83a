// Defines the operators of schemas.h as Python functions on numpy arrays.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_table_operators(pybind11::module_& m);

}  // namespace ngram_npu::numpy
