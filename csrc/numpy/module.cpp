// `ngram_npu._C`: the CPU kernels on numpy arrays, and what tests and `doctor` ask the build. No torch here.
#include "cpu/instruction_set.h"
#include "cpu/parallel.h"
#include "host/bookkeeping.h"
#include "host/correction.h"
#include "host/drafting.h"
#include "numpy/ascendc_plans.h"
#include "numpy/front_end.h"
#include "numpy/index_tools.h"

namespace ngram_npu::numpy {
namespace {

using py::arg;

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

void define_operators(py::module_& m) {
  m.def("ngram_propose", host::ngram_propose<NumpyCall>, arg("token_ids"), arg("num_tokens"), arg("row_indices"),
        arg("active"), arg("min_n"), arg("max_n"), arg("k"), arg("match_policy"), arg("overlap"), arg("max_len"));
  m.def("ngram_step_", host::ngram_step_<NumpyCall>, arg("token_ids"), arg("num_tokens"), arg("sampled_token_ids"),
        arg("discard"), arg("row_indices"), arg("advance"), arg("vocab_size"), arg("min_n"), arg("max_n"), arg("k"),
        arg("match_policy"), arg("overlap"), arg("max_len"), arg("workspace"));
  m.def("ngram_index_step_", host::ngram_index_step_<NumpyCall>, arg("token_ids"), arg("num_tokens"),
        arg("sampled_token_ids"), arg("discard"), arg("row_indices"), arg("advance"), arg("vocab_size"), arg("min_n"),
        arg("max_n"), arg("k"), arg("match_policy"), arg("overlap"), arg("max_len"), arg("index"), arg("slot_indices"),
        arg("workspace"));
  m.def("ngram_index_append_", host::ngram_index_append_<NumpyCall>, arg("token_ids"), arg("num_tokens"),
        arg("row_indices"), arg("index"), arg("slot_indices"), arg("min_n"), arg("max_n"), arg("match_policy"));
  m.def("ngram_index_reset_", host::ngram_index_reset_<NumpyCall>, arg("index"), arg("slot_indices"));
  m.def("prepare_next_token_ids", host::prepare_next_token_ids<NumpyCall>, arg("sampled_token_ids"), arg("discard"),
        arg("backup_token_ids"), arg("token_ids"), arg("num_tokens"), arg("row_indices"), arg("vocab_size"));
  m.def("prepare_inputs_padded", host::prepare_inputs_padded<NumpyCall>, arg("cu_num_draft_tokens"), arg("num_sampled"),
        arg("query_start_loc"));
  m.def("prepare_inputs", host::prepare_inputs<NumpyCall>, arg("query_start_loc"), arg("seq_lens"), arg("num_rejected"),
        arg("total_tokens"));
  m.def("prepare_input_ids_", host::prepare_input_ids_<NumpyCall>, arg("input_ids"), arg("query_start_loc"),
        arg("prev_positions"), arg("next_token_ids"), arg("draft_token_ids"), arg("num_scheduled_drafts"),
        arg("pad_token"));
  m.def("correct_num_computed_tokens_", host::correct_num_computed_tokens_<NumpyCall>, arg("num_computed_tokens"),
        arg("num_accepted_tokens"), arg("prev_positions"), arg("num_sampled_prev"), arg("num_draft_prev"),
        arg("host_num_computed_tokens"));
  m.def("compute_slot_mapping_", host::compute_slot_mapping_<NumpyCall>, arg("query_start_loc"), arg("positions"),
        arg("block_table"), arg("row_indices"), arg("slot_mapping"), arg("block_size"), arg("blocks_per_kv_block"),
        arg("cp_world"), arg("cp_rank"), arg("cp_interleave"), arg("pad_id"));
  m.def("correct_spec_state_", host::correct_spec_state_<NumpyCall>, arg("num_computed_tokens"),
        arg("num_accepted_tokens"), arg("positions"), arg("seq_lens"), arg("slot_mapping"), arg("discard"),
        arg("prev_positions"), arg("num_sampled_prev"), arg("num_draft_prev"), arg("host_num_computed_tokens"),
        arg("query_start_loc"), arg("num_tokens"), arg("block_table"), arg("row_indices"), arg("block_size"),
        arg("blocks_per_kv_block"), arg("cp_world"), arg("cp_rank"), arg("cp_interleave"), arg("pad_id"),
        arg("workspace"));
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "The CPU kernels of ngram_npu on numpy arrays: no copy, no torch, the GIL released.";
  m.attr("__version__") = NGRAM_NPU_VERSION;
  m.attr("compiler") = "g++ " __VERSION__;
  m.def("instruction_set", [] { return std::string(ngram_npu_cpu_instruction_set()); });
  m.def("set_instruction_set", set_instruction_set, arg("name"));
  m.def("num_threads", ngram_npu_cpu_num_threads);
  m.def("set_num_threads", set_num_threads, arg("limit"));
  m.def("workspace_words", &host::workspace_words, arg("op"), arg("batch"));
  define_operators(m);
  define_index_tools(m);
  define_ascendc_plans(m);
}

}  // namespace
}  // namespace ngram_npu::numpy
