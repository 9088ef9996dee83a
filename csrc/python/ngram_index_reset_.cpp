#include "host/ngram_index_reset_.h"

#include "python/ops.h"

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const ngram_npu::NgramIndexResetParams*, void*);

namespace ngram_npu::python {
namespace {

void ngram_index_reset_(py::handle index, py::handle slot_indices) {
  constexpr const char* op = "ngram_index_reset_";
  const NgramIndexResetParams p =
      host::check_ngram_index_reset_(*ArrayView(op, "index", index), *ArrayView(op, "slot_indices", slot_indices));
  run(op, ngram_npu_cpu_ngram_index_reset_, p);
}

}  // namespace

void define_ngram_index_reset_(py::module_& m) {
  m.def("ngram_index_reset_", ngram_index_reset_, py::arg("index"), py::arg("slot_indices"));
}

}  // namespace ngram_npu::python
