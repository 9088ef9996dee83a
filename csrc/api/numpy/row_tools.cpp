// Rows of a token buffer: which request each has (vLLM's V1 drafter), and their copies for a device (AsyncSpecState).
#include <algorithm>
#include <string>
#include <vector>

#include "api/numpy/numpy_call.h"
#include "cpu/row_packing.h"
#include "cpu/row_recognizer.h"

namespace ngram_npu::numpy {
namespace {

constexpr const char* kName = "RowRecognizer";

template <class T>
py::array_t<T> as_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

cpu::RowRecognizer make_recognizer(int64_t num_slots) {
  api::Arguments(kName).scalar("num_slots", num_slots, 0, INT32_MAX);
  return cpu::RowRecognizer(num_slots);
}

// (slots [B] int32, rows with a new request int64)
py::tuple assign(cpu::RowRecognizer& self, py::handle token_ids, py::handle num_tokens, py::handle num_sampled) {
  NumpyCall call(kName);
  const api::TensorView lengths = call("num_tokens", num_tokens);
  const int32_t* ends = call.int32s(lengths, -1);
  const int64_t batch = lengths.sizes[0];
  const int32_t* counts = call.int32s(call("num_sampled", num_sampled), batch);
  const auto rows = call.rows<const int32_t>(call("token_ids", token_ids));
  if (rows.rows < batch) call.fail("token_ids", std::to_string(batch) + " rows", std::to_string(rows.rows));
  if (batch > self.num_slots()) {
    call.fail("num_tokens", "at most " + std::to_string(self.num_slots()) + " rows, the number of slots",
              std::to_string(batch));
  }
  py::array_t<int32_t> slots(batch);
  const std::vector<int64_t> new_rows = self.assign(rows, ends, counts, batch, slots.mutable_data());
  return py::make_tuple(std::move(slots), as_array(new_rows));
}

py::array_t<int32_t> forget_absent(cpu::RowRecognizer& self, int64_t steps) {
  api::Arguments(kName).scalar("steps", steps, 0, INT32_MAX);
  return as_array(self.forget_absent(steps));
}

// (places [C] int64, chunks [C, 64], how many chunks are of the first `split` rows, the smallest item of the others).
// Row i gets chunks from firsts[i] on, enough for least[i] items.
py::tuple pack_rows(const py::list& rows, py::handle firsts, py::handle least, int64_t split) {
  NumpyCall call("pack_rows");
  const auto count = static_cast<int64_t>(rows.size());
  const api::TensorView firsts_view = call("firsts", firsts), least_view = call("least", least);
  call.vector(firsts_view, {api::DType::kInt64}, count, api::Arguments::kRead);
  call.vector(least_view, {api::DType::kInt64}, count, api::Arguments::kRead);
  call.scalar("split", split, 0, count);
  const auto* first = static_cast<const int64_t*>(firsts_view.data);
  const auto* at_least = static_cast<const int64_t*>(least_view.data);

  std::vector<cpu::SourceRow> sources;
  int64_t num_chunks = 0, chunks_before_split = 0;
  for (int64_t i = 0; i < count; ++i) {
    const py::object row = rows[static_cast<size_t>(i)];
    const api::TensorView view = call("rows", py::handle(row));
    if (view.ndim != 1 || view.dtype != api::DType::kInt32)
      call.fail("rows", "int32 vectors", "another array at " + std::to_string(i));
    call.scalar("rows", view.sizes[0], 0, INT32_MAX);
    call.scalar("least", at_least[i], 0, INT32_MAX);
    const int64_t stride = py::reinterpret_borrow<py::array>(row).strides(0);
    sources.push_back({static_cast<const char*>(view.data), stride, view.sizes[0], at_least[i], first[i]});
    num_chunks += sources.back().num_chunks();
    if (i < split) chunks_before_split = num_chunks;
  }
  py::array_t<int64_t> places(num_chunks);
  py::array_t<int32_t> chunks({num_chunks, cpu::kChunkItems});
  const int32_t smallest = cpu::pack_rows(sources, split, places.mutable_data(), chunks.mutable_data());
  return py::make_tuple(std::move(places), std::move(chunks), chunks_before_split, smallest);
}

py::array_t<int32_t> join_spans(py::handle items, py::handle begins, py::handle counts) {
  NumpyCall call("join_spans");
  const api::TensorView source = call("items", items), begins_view = call("begins", begins);
  const int32_t* from = call.int32s(source, -1);
  call.vector(begins_view, {api::DType::kInt64}, -1, api::Arguments::kRead);
  const int64_t num_spans = begins_view.sizes[0];
  const auto* begin = static_cast<const int64_t*>(begins_view.data);
  const int32_t* count = call.int32s(call("counts", counts), num_spans);
  int64_t total = 0;
  for (int64_t i = 0; i < num_spans; ++i) {
    call.scalar("counts", count[i], 0, source.sizes[0]);
    call.scalar("begins", begin[i], 0, source.sizes[0] - count[i]);
    total += count[i];
  }
  py::array_t<int32_t> joined(total);
  cpu::join_spans(from, begin, count, num_spans, joined.mutable_data());
  return joined;
}

}  // namespace

void define_row_tools(py::module_& m) {
  using py::arg;
  m.attr("CHUNK") = cpu::kChunkItems;
  m.def("pack_rows", pack_rows, arg("rows"), arg("firsts"), arg("least"), arg("split"));
  m.def("join_spans", join_spans, arg("items"), arg("begins"), arg("counts"));
  py::class_<cpu::RowRecognizer>(m, kName)
      .def(py::init(&make_recognizer), arg("num_slots"))
      .def("assign", &assign, arg("token_ids"), arg("num_tokens"), arg("num_sampled"))
      .def("forget_absent", &forget_absent, arg("steps"))
      .def_property_readonly("row_slots", [](const cpu::RowRecognizer& self) { return as_array(self.row_slots()); })
      .def("__copy__", [](const cpu::RowRecognizer& self) { return cpu::RowRecognizer(self); });
}

}  // namespace ngram_npu::numpy
