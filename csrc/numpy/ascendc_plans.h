// How the AscendC kernels would be launched, for tests.
#pragma once

#include <pybind11/pybind11.h>

namespace ngram_npu::numpy {

void define_ascendc_plans(pybind11::module_& m);

}  // namespace ngram_npu::numpy
