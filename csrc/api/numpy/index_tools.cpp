// numpy bindings for an index: the functions of NgramIndex (python/ngram_npu/index.py), and IndexPolicy and
// index_catch_up, with which vLLM's V1 drafter decides when to index.
#include <numeric>
#include <utility>
#include <vector>

#include "api/drafting.h"
#include "api/numpy/numpy_call.h"
#include "core/ngram_index_layout.h"
#include "cpu/index_policy.h"
#include "cpu/ngram_index.h"

namespace ngram_npu::numpy {
namespace {

api::TensorView view_index(const char* op, py::handle index, api::Arguments::Access access) {
  NumpyCall call(op);
  const api::TensorView view = call.view("index", index);
  call.check_vector(view, {api::DType::kInt32}, -1, access);
  return view;
}

void init_index(py::handle index, int64_t num_slots) {
  constexpr const char* op = "index_init";
  const api::TensorView view = view_index(op, index, api::Arguments::kWrite);
  if (ngram_npu_cpu_ngram_index_init(static_cast<int32_t*>(view.data), view.sizes[0], num_slots) != kOk) {
    api::Arguments(op).fail("index", "enough words for " + std::to_string(num_slots) + " slots and one page",
                            std::to_string(view.sizes[0]) + " words");
  }
}

// Returns the index of the fault in INDEX_FAULTS, and the slot or page that has the fault.
std::pair<int32_t, int64_t> check_index(py::handle index) {
  const api::TensorView view = view_index("index_check", index, api::Arguments::kRead);
  int64_t location = 0;
  const int32_t fault =
      ngram_npu_cpu_ngram_index_check(static_cast<const int32_t*>(view.data), view.sizes[0], &location);
  return {fault, location};
}

int32_t check_index_row(py::handle index, int64_t slot, py::handle tokens) {
  constexpr const char* op = "index_check_row";
  const api::TensorView view = view_index(op, index, api::Arguments::kRead);
  NumpyCall call(op);
  const api::TensorView row = call.view("tokens", tokens);
  const int32_t* data = call.check_int32s(row, api::kAnySize);
  return ngram_npu_cpu_ngram_index_check_row(static_cast<const int32_t*>(view.data), view.sizes[0], slot, data,
                                             row.sizes[0]);
}

py::dict get_index_statistics(py::handle index) {
  constexpr std::pair<const char*, int> kWords[] = {
      {"num_slots", index::kHeaderSlots},
      {"num_pages", index::kHeaderPages},
      {"pages_in_use", index::kHeaderPagesInUse},
      {"pages_peak", index::kHeaderPagesPeak},
      {"rows_indexed", index::kStatIndexed},
      {"rows_scanned_full", index::kStatScanFull},
      {"rows_scanned_catching_up", index::kStatScanCatchUp},
      {"rows_scanned_other", index::kStatScanOther},
      {"rebuilds_shorter", index::kStatRebuildLength},
      {"rebuilds_rewritten", index::kStatRebuildTokens},
      {"rebuilds_options", index::kStatRebuildOptions},
      {"page_splits", index::kStatSplits},
      {"slots_disabled", index::kStatDisabled},
  };
  const api::TensorView view = view_index("index_statistics", index, api::Arguments::kRead);
  const auto* words = static_cast<const uint32_t*>(view.data);
  py::dict statistics;
  // Words beyond the end of the tensor count as 0.
  for (const auto& [name, word] : kWords) statistics[name] = word < view.sizes[0] ? words[word] : 0;
  return statistics;
}

// Returns the indexing budget of this step as a multiple of one step's budget; 0: the step scans the rows instead.
int64_t compute_budget_factor(const cpu::IndexPolicy& self, int64_t step, py::handle num_tokens, py::handle num_sampled,
                              int64_t num_behind) {
  NumpyCall call("IndexPolicy.compute_budget_factor");
  const api::TensorView lengths = call.view("num_tokens", num_tokens);
  const int32_t* num_tokens_data = call.check_int32s(lengths, api::kAnySize);
  const int64_t rows = lengths.sizes[0];
  const int32_t* num_sampled_data = call.check_int32s(call.view("num_sampled", num_sampled), rows);
  const int64_t total = std::accumulate(num_tokens_data, num_tokens_data + rows, int64_t{0});
  // Only the first row is tested, which is faster. If only other rows have new tokens, the step counts as one without
  // new tokens, whose budget is that of one step.
  const bool has_new_tokens = rows > 0 && num_sampled_data[0] > 0;
  return self.compute_budget_factor(step, total, rows, num_behind, has_new_tokens);
}

// Before a lookup, indexes some of the tokens that are missing in the rows' slots. Returns the slots to look up (-1:
// scan the row) and the number of rows that are behind: too many of their tokens are missing, so they are scanned.
py::tuple catch_up_index(const cpu::IndexPolicy& policy, py::handle token_ids, py::handle num_tokens, py::handle index,
                         py::handle slot_indices, py::handle num_sampled, int64_t min_n, int64_t max_n,
                         int64_t match_policy, bool ladder, bool outcomes, int64_t steps) {
  NumpyCall call("index_catch_up");
  const api::TensorView slots_view = call.view("slot_indices", slot_indices);
  const int32_t* slots = call.check_int32s(slots_view, api::kAnySize);
  const int64_t batch = slots_view.sizes[0];
  NgramIndexAppendParams p{};
  p.token_ids = call.check_token_rows<const int32_t>(call.view("token_ids", token_ids));
  if (p.token_ids.rows < batch)
    call.fail("token_ids", std::to_string(batch) + " rows or more", std::to_string(p.token_ids.rows) + " rows");
  const int32_t* num_tokens_data = call.check_int32s(call.view("num_tokens", num_tokens), batch);
  const int32_t* num_sampled_data = call.check_int32s(call.view("num_sampled", num_sampled), batch);
  const api::TensorView words = call.view("index", index);
  p.index = {call.check_output_int32s(words, api::kAnySize), words.sizes[0], {}};
  call.check_scalar("steps", steps, 1, INT32_MAX);
  call.check_ngram_range(min_n, max_n, match_policy);
  call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
  call.check_no_overlap();

  std::vector<int64_t> indexed_lengths(static_cast<size_t>(batch));
  ngram_npu_cpu_ngram_index_lengths(p.index.words, p.index.num_words, slots, batch, indexed_lengths.data());
  const cpu::CatchUpPlan plan =
      cpu::plan_catch_up(policy, num_tokens_data, num_sampled_data, slots, indexed_lengths, steps);
  if (!plan.rows.empty()) {
    p.num_tokens = plan.num_tokens.data();
    p.row_indices = {plan.rows.data(), sizeof(int64_t)};
    p.batch = static_cast<int64_t>(plan.rows.size());
    p.min_n = min_n;
    p.max_n = max_n;
    p.match_policy = static_cast<int32_t>(match_policy);
    p.ladder = ladder;
    p.outcomes = outcomes;
    p.index.slot_indices = {plan.slots.data(), sizeof(int32_t)};
    const Executor executor = NumpyCall::executor();
    p.executor = &executor;
    NumpyCall::run<api::ngram_index_append__op>(p);
  }
  return py::make_tuple(py::array_t<int32_t>(batch, plan.lookup_slots.data()), plan.num_behind);
}

void define_index_policy(py::module_& m) {
  using cpu::IndexPolicy;
  py::class_<IndexPolicy>(m, "IndexPolicy")
      .def(py::init<>())
      .def_readwrite("max_scan_row_capacity", &IndexPolicy::max_scan_row_capacity)
      .def_readwrite("max_scan_context", &IndexPolicy::max_scan_context)
      .def_readwrite("max_scan_tokens", &IndexPolicy::max_scan_tokens)
      .def_readwrite("prefill_index_budget", &IndexPolicy::prefill_index_budget)
      .def_readwrite("min_index_budget", &IndexPolicy::min_index_budget)
      .def_readwrite("steps_to_catch_up", &IndexPolicy::steps_to_catch_up)
      .def_readwrite("max_absent_steps", &IndexPolicy::max_absent_steps)
      .def("compute_budget_factor", compute_budget_factor, py::arg("step"), py::arg("num_tokens"),
           py::arg("num_sampled"), py::arg("num_behind"))
      // The number of steps after which absent requests lose their slots; negative: they keep their slots.
      // share_in_use: share of the memory, 0 to 1. ends_requests: whether a store must know when requests have ended.
      .def("compute_steps_to_keep_absent", &IndexPolicy::compute_steps_to_keep_absent, py::arg("step"),
           py::arg("share_in_use"), py::arg("ends_requests"));
  m.def("index_catch_up", catch_up_index, py::arg("policy"), py::arg("token_ids"), py::arg("num_tokens"),
        py::arg("index"), py::arg("slot_indices"), py::arg("num_sampled"), py::arg("min_n"), py::arg("max_n"),
        py::arg("match_policy"), py::arg("ladder"), py::arg("outcomes"), py::arg("steps"));
}

}  // namespace

void define_index_tools(py::module_& m) {
  py::list faults;
  for (const char* text : kIndexFaultTexts) faults.append(text);
  m.attr("INDEX_FAULTS") = faults;
  m.attr("INDEX_PAGE_WORDS") = index::kPageWords;
  m.attr("INDEX_MAX_SLOTS") = index::kMaxSlots;
  m.attr("INDEX_HEADER_PAGES") = static_cast<int>(index::kHeaderPages);
  m.attr("INDEX_HEADER_UNUSED_PAGE") = static_cast<int>(index::kHeaderUnusedPage);
  m.attr("INDEX_HEADER_PAGES_IN_USE") = static_cast<int>(index::kHeaderPagesInUse);
  m.def("index_words", ngram_npu_cpu_ngram_index_words, py::arg("num_slots"), py::arg("num_pages"));
  // any_data: whether the pages must suffice for any tokens, not only for tokens of text.
  m.def("index_pages", ngram_npu_cpu_ngram_index_pages, py::arg("tokens"), py::arg("num_slots"), py::arg("min_n"),
        py::arg("max_n"), py::arg("any_data"), py::arg("ladder") = false, py::arg("outcomes") = false);
  m.def("index_init", init_index, py::arg("index"), py::arg("num_slots"));
  m.def("index_check", check_index, py::arg("index"));
  m.def("index_check_row", check_index_row, py::arg("index"), py::arg("slot"), py::arg("tokens"));
  m.def("index_statistics", get_index_statistics, py::arg("index"));
  define_index_policy(m);
}

}  // namespace ngram_npu::numpy
