// What AsyncSpecState (python/ngram_npu/async_state) does for each request of a step: in Python a request that joins
// took longer than all operators of its step.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "api/numpy/module.h"
#include "api/numpy/numpy_call.h"

namespace ngram_npu::numpy {
namespace {

constexpr int64_t kChunk = 64;
constexpr int32_t kUnused = -1;

// Rows in whole chunks, unused beyond a row's end: (places [C] int64, chunks [C, 64], how many are of the first
// `split` rows, the smallest item of the others). Row i takes chunks from firsts[i] on, and at least so many that they
// hold least[i] items.
py::tuple pack_rows(const py::list& rows, py::handle firsts, py::handle least, int64_t split) {
  NumpyCall call("pack_rows");
  const auto count = static_cast<int64_t>(rows.size());
  const api::TensorView firsts_view = call("firsts", firsts), least_view = call("least", least);
  call.vector(firsts_view, {api::DType::kInt64}, count, api::Arguments::kRead);
  call.vector(least_view, {api::DType::kInt64}, count, api::Arguments::kRead);
  call.scalar("split", split, 0, count);
  const auto* first = static_cast<const int64_t*>(firsts_view.data);
  const auto* at_least = static_cast<const int64_t*>(least_view.data);

  std::vector<api::TensorView> views;
  std::vector<int64_t> chunks_of;
  int64_t total = 0, of_split = 0;
  for (int64_t i = 0; i < count; ++i) {
    const py::object row = rows[static_cast<size_t>(i)];
    const api::TensorView view = call("rows", py::handle(row));
    if (view.ndim != 1 || view.dtype != api::DType::kInt32)
      call.fail("rows", "int32 vectors", "another array at " + std::to_string(i));
    call.scalar("rows", view.sizes[0], 0, INT32_MAX);
    call.scalar("least", at_least[i], 0, INT32_MAX);
    views.push_back(view);
    chunks_of.push_back((larger(view.sizes[0], at_least[i]) + kChunk - 1) / kChunk);
    total += chunks_of.back();
    if (i < split) of_split = total;
  }
  py::array_t<int64_t> places(total);
  py::array_t<int32_t> chunks({total, kChunk});
  int64_t* place = places.mutable_data();
  int32_t* to = chunks.mutable_data();
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < count; ++i) {
    const api::TensorView& view = views[static_cast<size_t>(i)];
    const int64_t size = view.sizes[0], taken = chunks_of[static_cast<size_t>(i)];
    // In bytes: a runner's row may be unaligned.
    const auto* from = static_cast<const char*>(view.data);
    const py::ssize_t step = py::reinterpret_borrow<py::array>(rows[static_cast<size_t>(i)]).strides(0);
    for (int64_t j = 0; j < size; ++j) std::memcpy(to + j, from + j * step, sizeof(int32_t));
    if (i >= split && size > 0) smallest = smaller(smallest, *std::min_element(to, to + size));
    std::fill(to + size, to + taken * kChunk, kUnused);
    for (int64_t j = 0; j < taken; ++j) *place++ = first[i] + j;
    to += taken * kChunk;
  }
  return py::make_tuple(std::move(places), std::move(chunks), of_split, smallest);
}

// items[begins[i] : begins[i] + counts[i]] of each i, one after the other.
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
  int32_t* to = joined.mutable_data();
  for (int64_t i = 0; i < num_spans; to += count[i], ++i) {
    std::memcpy(to, from + begin[i], sizeof(int32_t) * static_cast<size_t>(count[i]));
  }
  return joined;
}

}  // namespace

void define_async_tools(py::module_& m) {
  m.attr("CHUNK") = kChunk;
  m.def("pack_rows", pack_rows, py::arg("rows"), py::arg("firsts"), py::arg("least"), py::arg("split"));
  m.def("join_spans", join_spans, py::arg("items"), py::arg("begins"), py::arg("counts"));
}

}  // namespace ngram_npu::numpy
