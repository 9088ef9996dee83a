// Functions besides the operators, with which NgramStore makes, checks, reads and clears a store.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_store_tools(pybind11::module_& m);

}  // namespace ngram_npu::numpy
