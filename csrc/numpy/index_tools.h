// Functions besides the operators, with which NgramIndex and DeviceNgramIndex make, size, check and read an index.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_index_tools(pybind11::module_& m);

}  // namespace ngram_npu::numpy
