// Making, sizing, checking and reading an index, for NgramIndex (python/ngram_npu/index.py).
#include "core/ngram_index_layout.h"
#include "cpu/ngram_index.h"
#include "python/index_view.h"
#include "python/ops.h"

namespace ngram_npu::python {
namespace {

void index_init(py::handle index, int64_t num_slots) {
  constexpr const char* op = "index_init";
  const host::TensorView view = index_view(op, index, host::Arguments::kWrite);
  if (ngram_npu_cpu_ngram_index_init(static_cast<int32_t*>(view.data), view.sizes[0], num_slots) != kOk) {
    host::Arguments(op).fail("index", "room for " + std::to_string(num_slots) + " slots and a page",
                             std::to_string(view.sizes[0]) + " words");
  }
}

std::pair<int32_t, int64_t> index_check(py::handle index) {
  const host::TensorView view = index_view("index_check", index, host::Arguments::kRead);
  int64_t where = 0;
  const int32_t fault = ngram_npu_cpu_ngram_index_check(static_cast<const int32_t*>(view.data), view.sizes[0], &where);
  return {fault, where};
}

int32_t index_check_row(py::handle index, int64_t slot, py::handle tokens) {
  return check_index_row("index_check_row", index, slot, tokens, ngram_npu_cpu_ngram_index_check_row);
}

py::dict index_statistics(py::handle index) {
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
      {"slots_given_up", index::kStatGivenUp},
  };
  return header_words("index_statistics", index, kWords);
}

}  // namespace

void define_index_tools(py::module_& m) {
  m.attr("INDEX_PAGE_WORDS") = index::kPageWords;
  m.attr("INDEX_MAX_SLOTS") = index::kMaxSlots;
  m.attr("INDEX_HEADER_PAGES") = static_cast<int>(index::kHeaderPages);
  m.attr("INDEX_HEADER_UNUSED_PAGE") = static_cast<int>(index::kHeaderUnusedPage);
  m.attr("INDEX_HEADER_PAGES_IN_USE") = static_cast<int>(index::kHeaderPagesInUse);
  m.def("index_words", ngram_npu_cpu_ngram_index_words, py::arg("num_slots"), py::arg("num_pages"));
  m.def(
      "index_pages",
      [](int64_t tokens, int64_t num_slots, int64_t min_n, int64_t max_n, bool any_data) {
        return ngram_npu_cpu_ngram_index_pages(tokens, num_slots, min_n, max_n, any_data);
      },
      py::arg("tokens"), py::arg("num_slots"), py::arg("min_n"), py::arg("max_n"), py::arg("any_data"));
  m.def("index_init", index_init, py::arg("index"), py::arg("num_slots"));
  m.def("index_check", index_check, py::arg("index"));
  m.def("index_check_row", index_check_row, py::arg("index"), py::arg("slot"), py::arg("tokens"));
  m.def("index_statistics", index_statistics, py::arg("index"));
}

}  // namespace ngram_npu::python
