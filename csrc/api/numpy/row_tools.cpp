// numpy bindings of functions for which Python or NumPy would take too long: packing rows for copies to the device, for
// AsyncSpecState, and the lists of tokens of vLLM's V1 model runner.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "api/numpy/arrays.h"

namespace ngram_npu::numpy {
namespace {

constexpr int64_t kChunkItems = 64;
constexpr int32_t kUnusedItem = -1;

struct SourceRow {
  const char* data;     // int32 items, possibly unaligned: a runner's row may be a slice
  int64_t stride;       // in bytes
  int64_t size;         // number of items
  int64_t min_items;    // the row is padded to at least this many items
  int64_t first_chunk;  // index of the row's first destination chunk

  int64_t num_chunks() const { return (larger(size, min_items) + kChunkItems - 1) / kChunkItems; }
};

// Writes rows as whole chunks, padded with kUnusedItem, and the destination index of each chunk. Returns the smallest
// item of the rows from `split` on; INT32_MAX if they have no items.
int32_t copy_rows(const std::vector<SourceRow>& rows, int64_t split, int64_t* chunk_indices, int32_t* chunks) {
  int32_t min_item = INT32_MAX;
  for (size_t i = 0; i < rows.size(); ++i) {
    const SourceRow& row = rows[i];
    for (int64_t j = 0; j < row.size; ++j) std::memcpy(chunks + j, row.data + j * row.stride, sizeof(int32_t));
    if (static_cast<int64_t>(i) >= split && row.size > 0)
      min_item = smaller(min_item, *std::min_element(chunks, chunks + row.size));
    const int64_t num_chunks = row.num_chunks();
    std::fill(chunks + row.size, chunks + num_chunks * kChunkItems, kUnusedItem);
    for (int64_t j = 0; j < num_chunks; ++j) *chunk_indices++ = row.first_chunk + j;
    chunks += num_chunks * kChunkItems;
  }
  return min_item;
}

// Checks a vector of this size (-1: any) and returns its properties.
api::TensorView check_vector(const api::Arguments& call, const char* name, py::handle array, api::DTypes dtype,
                             int64_t size = -1) {
  const api::TensorView view = view_array(call, name, array);
  call.check_tensor(view, dtype, 1, api::Arguments::kRead, view);
  if (size >= 0) call.check_size(view, size);
  return view;
}

// Packs the rows into chunks of 64 items for one copy to the device. Returns (destination chunk indices [C] int64,
// chunks [C, 64] int32, number of chunks of rows [0, split), smallest item of the other rows). The first chunk of row i
// has index first_chunks[i]; the row is padded to at least min_items[i] items.
py::tuple pack_rows(const py::list& rows, py::handle first_chunks, py::handle min_items, int64_t split) {
  const api::Arguments call("pack_rows");
  const auto count = static_cast<int64_t>(rows.size());
  const api::TensorView first_chunks_view = check_vector(call, "first_chunks", first_chunks, api::kInt64, count),
                        min_items_view = check_vector(call, "min_items", min_items, api::kInt64, count);
  call.check_scalar("split", split, {0, count});
  const auto* first_chunks_data = static_cast<const int64_t*>(first_chunks_view.data);
  const auto* min_items_data = static_cast<const int64_t*>(min_items_view.data);

  std::vector<SourceRow> sources;
  int64_t num_chunks = 0, chunks_before_split = 0;
  for (int64_t i = 0; i < count; ++i) {
    const py::object row = rows[static_cast<size_t>(i)];
    const api::TensorView view = view_array(call, "rows", row);
    if (view.ndim != 1 || view.dtype != api::DType::kInt32)
      call.fail("rows", "int32 vectors", "an array of another dtype or rank at index " + std::to_string(i));
    call.check_scalar("rows item length", view.sizes[0], {0, INT32_MAX});
    call.check_scalar("min_items", min_items_data[i], {0, INT32_MAX});
    const int64_t stride = py::reinterpret_borrow<py::array>(row).strides(0);
    sources.push_back(
        {static_cast<const char*>(view.data), stride, view.sizes[0], min_items_data[i], first_chunks_data[i]});
    num_chunks += sources.back().num_chunks();
    if (i < split) chunks_before_split = num_chunks;
  }
  py::array_t<int64_t> chunk_indices(num_chunks);
  py::array_t<int32_t> chunks({num_chunks, kChunkItems});
  const int32_t min_item = copy_rows(sources, split, chunk_indices.mutable_data(), chunks.mutable_data());
  return py::make_tuple(std::move(chunk_indices), std::move(chunks), chunks_before_split, min_item);
}

// Concatenates items[begins[i] : begins[i] + counts[i]].
py::array_t<int32_t> join_spans(py::handle items, py::handle begins, py::handle counts) {
  const api::Arguments call("join_spans");
  const api::TensorView items_view = check_vector(call, "items", items, api::kInt32),
                        begins_view = check_vector(call, "begins", begins, api::kInt64);
  const int64_t num_spans = begins_view.sizes[0];
  const api::TensorView counts_view = check_vector(call, "counts", counts, api::kInt32, num_spans);
  const auto* items_data = static_cast<const int32_t*>(items_view.data);
  const auto* begins_data = static_cast<const int64_t*>(begins_view.data);
  const auto* counts_data = static_cast<const int32_t*>(counts_view.data);
  int64_t total = 0;
  for (int64_t i = 0; i < num_spans; ++i) {
    call.check_scalar("counts", counts_data[i], {0, items_view.sizes[0]});
    call.check_scalar("begins", begins_data[i], {0, items_view.sizes[0] - counts_data[i]});
    total += counts_data[i];
  }
  py::array_t<int32_t> joined_items(total);
  int32_t* joined_end = joined_items.mutable_data();
  for (int64_t i = 0; i < num_spans; ++i) {
    joined_end = std::copy_n(items_data + begins_data[i], counts_data[i], joined_end);
  }
  return joined_items;
}

// Returns the number of items of each list.
py::array_t<int32_t> count_items(const py::list& lists) {
  py::array_t<int32_t> counts(static_cast<py::ssize_t>(lists.size()));
  int32_t* data = counts.mutable_data();
  for (size_t i = 0; i < lists.size(); ++i) {
    const Py_ssize_t count = PyObject_Length(PyList_GET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(i)));
    if (count < 0) throw py::error_already_set();
    data[i] = static_cast<int32_t>(count);
  }
  return counts;
}

// Returns the first num_draft_tokens[i] tokens of each draft as a list.
py::list list_drafts(py::handle draft_token_ids, py::handle num_draft_tokens) {
  const api::Arguments call("list_drafts");
  const api::TensorView drafts = view_array(call, "draft_token_ids", draft_token_ids);
  call.check_tensor(drafts, api::kInt32, 2, api::Arguments::kRead, drafts);
  const int64_t batch = drafts.sizes[0];
  const api::TensorView counts = check_vector(call, "num_draft_tokens", num_draft_tokens, api::kInt32, batch);
  py::list lists(static_cast<size_t>(batch));
  for (int64_t i = 0; i < batch; ++i) {
    const int32_t count = static_cast<const int32_t*>(counts.data)[i];
    call.check_scalar("num_draft_tokens", count, {0, drafts.sizes[1]});
    const int32_t* draft = static_cast<const int32_t*>(drafts.data) + i * drafts.strides[0];
    py::list tokens(static_cast<size_t>(count));
    for (int32_t j = 0; j < count; ++j) PyList_SET_ITEM(tokens.ptr(), j, py::int_(draft[j]).release().ptr());
    PyList_SET_ITEM(lists.ptr(), i, tokens.release().ptr());
  }
  return lists;
}

}  // namespace

void define_row_tools(py::module_& m) {
  using py::arg;
  m.attr("CHUNK_ITEMS") = kChunkItems;
  m.def("pack_rows", pack_rows, arg("rows"), arg("first_chunks"), arg("min_items"), arg("split"));
  m.def("join_spans", join_spans, arg("items"), arg("begins"), arg("counts"));
  m.def("count_items", count_items, arg("lists"));
  m.def("list_drafts", list_drafts, arg("draft_token_ids"), arg("num_draft_tokens"));
}

}  // namespace ngram_npu::numpy
