// One function an operator, each in its own file.
#pragma once

#include "python/numpy_view.h"

namespace ngram_npu::python {

void define_ngram_index_append_(py::module_& m);
void define_ngram_index_reset_(py::module_& m);
void define_ngram_index_step_(py::module_& m);
void define_ngram_propose(py::module_& m);
void define_ngram_step_(py::module_& m);

// Not operators: what NgramIndex needs to make, size, check and read an index.
void define_index_tools(py::module_& m);

// The positional numpy calls take about a microsecond, so they make their outputs without a detour through Python.
inline py::array_t<int32_t> empty(int64_t size) { return py::array_t<int32_t>(size); }
inline py::array_t<int32_t> empty(int64_t rows, int64_t columns) { return py::array_t<int32_t>({rows, columns}); }

}  // namespace ngram_npu::python
