// Making, sizing, checking and reading an index of a GPU's layout, for DeviceNgramIndex (python/ngram_npu/index.py).
#include "core/ngram_index_device_layout.h"
#include "host/device_index.h"
#include "python/index_view.h"
#include "python/ops.h"

namespace ngram_npu::python {
namespace {

void device_index_init(py::handle header, int64_t num_slots, int64_t num_buckets, int32_t fingerprint_bits,
                       int32_t generation_bits) {
  host::Arguments arguments("device_index_init");
  const ArrayView view("device_index_init", "header", header);
  arguments.vector("header", *view, {host::DType::kInt32}, device_index::kHeaderWords, host::Arguments::kWrite);
  if (!host::device_index_init(static_cast<int32_t*>((*view).data), num_slots, num_buckets, fingerprint_bits,
                               generation_bits)) {
    arguments.fail("num_slots, num_buckets", "sizes an index can have",
                   std::to_string(num_slots) + ", " + std::to_string(num_buckets));
  }
}

std::pair<int32_t, int64_t> device_index_check(py::handle index) {
  const host::TensorView view = index_view("device_index_check", index, host::Arguments::kRead);
  int64_t where = 0;
  const auto fault = host::check_device_index(static_cast<const int32_t*>(view.data), view.sizes[0], &where);
  return {static_cast<int32_t>(fault), where};
}

int32_t device_index_check_row(py::handle index, int64_t slot, py::handle tokens) {
  return check_index_row("device_index_check_row", index, slot, tokens, host::check_device_index_row);
}

// Of an index, or as much of one as its header.
py::dict device_index_statistics(py::handle index) {
  constexpr std::pair<const char*, int> kWords[] = {
      {"num_slots", device_index::kHeaderSlots},
      {"num_buckets", device_index::kHeaderBuckets},
      {"entries_in_use", device_index::kHeaderEntries},
      {"rows_indexed", device_index::kStatIndexed},
      {"rows_scanned_full", device_index::kStatScanFull},
      {"rows_scanned_catching_up", device_index::kStatScanCatchUp},
      {"rows_scanned_other", device_index::kStatScanOther},
      {"rebuilds_shorter", device_index::kStatRebuildLength},
      {"rebuilds_rewritten", device_index::kStatRebuildTokens},
      {"rebuilds_options", device_index::kStatRebuildOptions},
      {"slots_given_up", device_index::kStatGivenUp},
  };
  return header_words("device_index_statistics", index, kWords);
}

}  // namespace

void define_device_index_tools(py::module_& m) {
  m.attr("DEVICE_INDEX_HEADER_WORDS") = device_index::kHeaderWords;
  m.def("device_index_words", host::device_index_words, py::arg("num_slots"), py::arg("num_buckets"));
  m.def("device_index_buckets", host::device_index_buckets, py::arg("tokens"), py::arg("min_n"), py::arg("max_n"));
  m.def("device_index_init", device_index_init, py::arg("header"), py::arg("num_slots"), py::arg("num_buckets"),
        py::arg("fingerprint_bits") = device_index::kFingerprintBits,
        py::arg("generation_bits") = device_index::kTenantBits);
  m.def("device_index_check", device_index_check, py::arg("index"));
  m.def("device_index_check_row", device_index_check_row, py::arg("index"), py::arg("slot"), py::arg("tokens"));
  m.def("device_index_statistics", device_index_statistics, py::arg("index"));
}

}  // namespace ngram_npu::python
