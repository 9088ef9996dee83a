// One function an operator, each in its own file.
#pragma once

#include "python/numpy_view.h"

namespace ngram_npu::python {

void define_ngram_index_append_(py::module_& m);
void define_ngram_index_reset_(py::module_& m);
void define_ngram_index_step_(py::module_& m);
void define_ngram_propose(py::module_& m);
void define_ngram_step_(py::module_& m);
void define_prepare_next_token_ids(py::module_& m);
void define_prepare_inputs_padded(py::module_& m);
void define_prepare_inputs(py::module_& m);
void define_correct_num_computed_tokens_(py::module_& m);
void define_compute_slot_mapping_(py::module_& m);
void define_correct_spec_state_(py::module_& m);
void define_prepare_input_ids_(py::module_& m);

// Not operators: what NgramIndex needs to make, size, check and read an index.
void define_index_tools(py::module_& m);
// How the AscendC kernels would be launched, for tests.
void define_ascendc_plans(py::module_& m);
void define_device_index_tools(py::module_& m);

// The positional numpy calls take about a microsecond, so they make their outputs without a detour through Python.
inline py::array_t<int32_t> empty(int64_t size) { return py::array_t<int32_t>(size); }
inline py::array_t<int32_t> empty(int64_t rows, int64_t columns) { return py::array_t<int32_t>({rows, columns}); }

// Runs a kernel with the GIL released. The checks leave it nothing to refuse but memory that it cannot get.
template <class Params>
void run(const char* op, int32_t (*kernel)(const Params*, void*), const Params& params) {
  int32_t status = kOk;
  {
    const py::gil_scoped_release released;
    status = kernel(&params, nullptr);
  }
  if (status != kOk) {
    throw std::runtime_error(std::string(op) + ": the kernel returned status " + std::to_string(status));
  }
}

}  // namespace ngram_npu::python
