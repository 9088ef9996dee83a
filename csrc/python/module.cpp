// `ngram_npu._C`: the CPU kernels on numpy arrays, and what tests and `doctor` ask the build. No torch here.
#include "cpu/instruction_set.h"
#include "cpu/parallel.h"
#include "host/workspace.h"
#include "python/ops.h"

namespace ngram_npu::python {
namespace {

void set_instruction_set(const std::string& name) {
  if (ngram_npu_cpu_set_instruction_set(name.c_str()) != kOk) {
    host::Arguments("set_instruction_set")
        .fail("name", "an instruction set of this machine or 'auto'", "'" + name + "'");
  }
}

void set_num_threads(int32_t limit) {
  host::Arguments("set_num_threads").scalar("limit", limit, 0, INT32_MAX);
  ngram_npu_cpu_set_num_threads(limit);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The CPU kernels of ngram_npu on numpy arrays: no copy, no torch, the GIL released.";
  m.attr("__version__") = NGRAM_NPU_VERSION;
  m.attr("compiler") = "g++ " __VERSION__;
  m.def("instruction_set", [] { return std::string(ngram_npu_cpu_instruction_set()); });
  m.def("set_instruction_set", set_instruction_set, py::arg("name"));
  m.def("num_threads", ngram_npu_cpu_num_threads);
  m.def("set_num_threads", set_num_threads, py::arg("limit"));
  m.def("workspace_words", &host::workspace_words, py::arg("op"), py::arg("batch"));
  define_ngram_index_append_(m);
  define_ngram_index_reset_(m);
  define_ngram_index_step_(m);
  define_ngram_propose(m);
  define_ngram_step_(m);
  define_index_tools(m);
  define_ascendc_plans(m);
  define_device_index_tools(m);
  define_prepare_next_token_ids(m);
  define_prepare_inputs_padded(m);
  define_prepare_inputs(m);
  define_correct_num_computed_tokens_(m);
  define_compute_slot_mapping_(m);
  define_correct_spec_state_(m);
  define_prepare_input_ids_(m);
}

}  // namespace
}  // namespace ngram_npu::python
