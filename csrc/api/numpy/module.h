// What _C has besides the operators; module.cpp puts it together.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_async_tools(pybind11::module_& m);
void define_index_tools(pybind11::module_& m);
void define_row_recognizer(pybind11::module_& m);
void define_store_tools(pybind11::module_& m);
void define_stream_drafter(pybind11::module_& m);

}  // namespace ngram_npu::numpy
