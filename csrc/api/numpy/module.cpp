// `ngram_npu._C`: the CPU kernels on numpy arrays, and properties of the build for tests and `doctor`, without torch.
#include "api/call.h"
#include "api/numpy/arrays.h"
#include "cpu/machine.h"

namespace ngram_npu::numpy {
namespace {

using py::arg;

void set_instruction_set(const std::string& name) {
  if (ngram_npu_cpu_set_instruction_set(name.c_str()) != kOk) {
    api::Arguments("set_instruction_set")
        .fail("name", "an instruction set of this machine or 'auto'", "'" + name + "'");
  }
}

void set_num_threads(int32_t limit) {
  api::Arguments("set_num_threads").check_scalar("limit", limit, {0, INT32_MAX});
  ngram_npu_cpu_set_num_threads(limit);
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The CPU kernels of ngram_npu on numpy arrays, without copies, without torch and without the GIL.";
  m.attr("__version__") = NGRAM_NPU_VERSION;
  m.attr("compiler") = "g++ " __VERSION__;
  m.attr("MAX_NGRAM") = kMaxNgram;
  m.attr("MAX_DRAFT_TOKENS") = kMaxDraftTokens;
  m.def("instruction_set", [] { return std::string(ngram_npu_cpu_instruction_set()); });
  m.def("set_instruction_set", set_instruction_set, arg("name"));
  m.def("num_threads", ngram_npu_cpu_num_threads);
  m.def("set_num_threads", set_num_threads, arg("limit"));
  m.def("workspace_words", &api::workspace_words, arg("op"), arg("batch"));
  define_operators(m);
  define_row_tools(m);
}

}  // namespace
}  // namespace ngram_npu::numpy
