// Implements call.h: interprets the table of an operator.
#include "api/call.h"

#include <cstring>

namespace ngram_npu::api {
namespace {

template <class T>
void write_field(char* params, const Field& field, const T& value) {
  std::memcpy(params + field.offset, static_cast<const void*>(&value), sizeof(T));
}

void write_scalar(char* params, const Field& field, int64_t value) {
  switch (field.kind) {
    case Field::kInt64: return write_field(params, field, value);
    case Field::kInt32: return write_field(params, field, static_cast<int32_t>(value));
    case Field::kBool: return write_field(params, field, value != 0);
    default: return;
  }
}

// Matrices of all types have the same memory layout.
using AnyRows = TokenRows<void>;
static_assert(sizeof(AnyRows) == sizeof(TokenRows<const int32_t>));

void write_tensor(char* params, const Field& field, const TensorView& view) {
  const auto bytes = static_cast<int32_t>(view.item_bytes);
  switch (field.kind) {
    case Field::kPointer: return write_field(params, field, view.data);
    case Field::kIndices: return write_field(params, field, IndexArray{view.data, bytes});
    case Field::kDrafts: return write_field(params, field, DraftRows{view.data, view.strides[0], bytes});
    case Field::kRows:
      return write_field(params, field, AnyRows{view.data, view.sizes[0], view.sizes[1], view.strides[0]});
    default: return;
  }
}

// The address range of a view, from its first element to one past its last element.
struct Extent {
  uintptr_t begin;
  uintptr_t end;
};

int64_t row_bytes(const TensorView& view) { return (view.ndim == 2 ? view.sizes[1] : 1) * view.item_bytes; }

Extent compute_extent(const TensorView& view) {
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  for (int32_t d = 0; d < view.ndim; ++d) {
    if (view.sizes[d] == 0) return {begin, begin};
  }
  if (view.ndim == 0) return {begin, begin + static_cast<uintptr_t>(view.item_bytes)};
  const int64_t last_row_offset = (view.sizes[0] - 1) * view.strides[0] * view.item_bytes;
  return {begin, begin + static_cast<uintptr_t>(last_row_offset + row_bytes(view))};
}

// Whether two matrices are disjoint column slices of one buffer.
bool are_interleaved(const TensorView& a, const TensorView& b) {
  if (a.ndim != 2 || b.ndim != 2 || a.strides[0] * a.item_bytes != b.strides[0] * b.item_bytes) return false;
  const int64_t pitch = a.strides[0] * a.item_bytes;
  if (pitch <= 0) return false;
  const auto difference = static_cast<int64_t>(reinterpret_cast<intptr_t>(b.data) - reinterpret_cast<intptr_t>(a.data));
  const int64_t offset = ((difference % pitch) + pitch) % pitch;  // offset of b's columns from a's
  return offset >= row_bytes(a) && offset + row_bytes(b) <= pitch;
}

bool do_overlap(const TensorView& a, const TensorView& b) {
  const Extent x = compute_extent(a);
  const Extent y = compute_extent(b);
  if (x.begin == x.end || y.begin == y.end || x.end <= y.begin || y.end <= x.begin) return false;
  return !are_interleaved(a, b);
}

std::string format_shape(int64_t rows, int64_t columns) {
  return "shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

}  // namespace

size_t Operator::find(std::string_view argument) const {
  size_t index = 0;
  while (index < arguments.size() && arguments[index].name != argument) ++index;
  return index;
}

void Call::bind_arguments(void* params) {
  auto* const bytes = static_cast<char*>(params);
  for (size_t i = 0; i < op_.arguments.size(); ++i) {
    if (op_.arguments[i].kind == OperatorArgument::kTensor) {
      bind_tensor(i, bytes);
    } else {
      bind_scalar(i, bytes);
    }
  }
  check_sizes(bytes);
}

void Call::bind_tensor(size_t argument, char* params) {
  const OperatorArgument& schema = op_.arguments[argument];
  const Argument& entry = *schema.entry;
  const Shape& shape = entry.shape;
  if (!values_[argument].is_present) {
    const Letter rows = shape.dims[0].rows;
    if (rows != kNoLetter && !letters_[B].is_bound) letters_[B] = letters_[rows];
    return;
  }
  const TensorView& view = values_[argument].tensor;
  if (first_ == nullptr) first_ = &view;
  check_tensor(view, entry.dtypes, shape.rank, schema.is_written ? kWrite : kRead, *first_);
  for (int32_t d = 0; d < shape.rank; ++d) bind_letter(shape.dims[static_cast<size_t>(d)], view.sizes[d], argument, d);
  write_tensor(params, entry.field, view);
}

void Call::bind_scalar(size_t argument, char* params) {
  const Argument& entry = *op_.arguments[argument].entry;
  const int64_t value = values_[argument].scalar;
  check_scalar(op_.arguments[argument].name.c_str(), value, entry.range);
  if (entry.shape.rank > 0) bind_letter(entry.shape.dims[0], value, argument, 0);
  write_scalar(params, entry.field, value);
}

void Call::bind_letter(const Dim& dim, int64_t size, size_t argument, int32_t dim_index) {
  if (dim.letter == kNoLetter || letters_[dim.letter].is_bound) return;
  if (dim.offset > 0 && size == 0) fail(op_.arguments[argument].name.c_str(), "size >= 1 (batch + 1)", "size 0");
  letters_[dim.letter] = {true, dim_index, argument, size - dim.offset};
}

void Call::check_sizes(char* params) const {
  for (const Size& limited : op_.sizes) {
    const BoundLetter& letter = letters_[limited.letter];
    const std::string& source = op_.arguments[letter.argument].name;
    const Range& range = limited.range;
    if (letter.is_bound && (letter.size < range.min || letter.size > range.max)) {
      check_scalar((letter.dim == 1 ? source + " width" : source).c_str(), letter.size, range);
    }
    write_scalar(params, limited.field, letter.size);
  }
  for (size_t i = 0; i < op_.arguments.size(); ++i) {
    if (values_[i].is_present) check_shape(i);
    const Letter rows = op_.arguments[i].entry->shape.dims[0].rows;
    if (rows == kNoLetter || values_[i].is_present || !letters_[rows].is_bound) continue;
    const BoundLetter &batch = letters_[B], &limit = letters_[rows];
    if (batch.size <= limit.size) continue;
    const OperatorArgument& table = op_.arguments[limit.argument];
    const std::string kind = table.entry->shape.rank == 2 ? "number of rows of " : "size of ";
    check_at_most(op_.arguments[batch.argument].name.c_str(), "batch", batch.size, limit.size,
                  (kind + table.name + ", because " + op_.arguments[i].name + " is None").c_str());
  }
}

int64_t Call::expected_size(const Dim& dim, int64_t size) const {
  if (dim.letter == kNoLetter) return dim.constant;
  if (dim.minimum != kNoLetter) return size;
  return letters_[dim.letter].size + dim.offset;
}

void Call::check_shape(size_t argument) const {
  const OperatorArgument& schema = op_.arguments[argument];
  const char* name = schema.name.c_str();
  const Shape& shape = schema.entry->shape;
  const TensorView& view = values_[argument].tensor;
  const int64_t rows = view.sizes[0], expected_rows = expected_size(shape.dims[0], rows);
  if (shape.rank == 2) {
    const int64_t columns = view.sizes[1], expected_columns = expected_size(shape.dims[1], columns);
    if (rows == expected_rows && columns == expected_columns) return;
    fail(name, format_shape(expected_rows, expected_columns), format_shape(rows, columns));
  }
  check_size(view, expected_rows);
  const Letter minimum = shape.dims[0].minimum;
  if (minimum != kNoLetter && rows < letters_[minimum].size) {
    fail(name,
         "size >= " + std::to_string(letters_[minimum].size) + " (size of " +
             op_.arguments[letters_[minimum].argument].name + ")",
         "size " + std::to_string(rows));
  }
}

void Call::check_no_overlap() const {
  for (size_t i = 0; i < op_.arguments.size(); ++i) {
    if (!op_.arguments[i].is_written || !values_[i].is_present) continue;
    const TensorView& view = values_[i].tensor;
    if (view.ndim == 2 && view.sizes[0] > 1 && view.sizes[1] > 0 && view.strides[0] < view.sizes[1]) {
      fail(view.name, "rows that do not overlap (the tensor is an output)",
           "outer stride " + std::to_string(view.strides[0]));
    }
    for (size_t j = 0; j < op_.arguments.size(); ++j) {
      if (j == i || !values_[j].is_present || !do_overlap(view, values_[j].tensor)) continue;
      fail(view.name, "memory not shared with another argument (the tensor is an output)",
           std::string("memory shared with ") + values_[j].tensor.name);
    }
  }
}

void Call::check_absent(const char* argument, const char* reason) const {
  if (has(argument)) fail(argument, std::string("None (") + reason + ")", "a tensor");
}

void Call::check_present(const char* argument, const char* reason) const {
  if (!has(argument)) fail(argument, std::string("a tensor (") + reason + ")", "None");
}

void Call::run(void* params, bool has_work, FrontEnd& front_end) const {
  auto* const bytes = static_cast<char*>(params);
  for (size_t i = 0; i < op_.results.size(); ++i) {
    const Result& result = op_.results[i];
    const Shape& shape = result.shape;
    TensorView view;
    view.dtype = result.like != nullptr ? this->view(result.like).dtype : DType::kInt32;
    view.item_bytes = view.dtype == DType::kInt64 ? 8 : 4;
    for (int32_t d = 0; d < shape.rank; ++d) view.sizes[d] = expected_size(shape.dims[static_cast<size_t>(d)], 0);
    view.strides[0] = shape.rank == 2 ? view.sizes[1] : 1;
    view.data = front_end.allocate_result(i, view.dtype, view.sizes, shape.rank);
    write_tensor(bytes, result.field, view);
  }
  if (!has_work) return;
  const Executor executor = op_.executor.kind != Field::kNone ? front_end.executor() : Executor{};
  if (op_.executor.kind != Field::kNone) write_field(bytes, op_.executor, &executor);
  if (op_.workspace.kind != Field::kNone) {
    const size_t argument = op_.find("workspace");
    const bool is_given = argument < op_.arguments.size() && values_[argument].is_present;
    const TensorView* const given = is_given ? &values_[argument].tensor : nullptr;
    write_field(bytes, op_.workspace, front_end.prepare_workspace(*this, params, given));
  }
  front_end.run(params);
}

}  // namespace ngram_npu::api
