// Implements call.h: interprets the table of an operator.
#include "api/call.h"

#include <cstring>

namespace ngram_npu::api {
namespace {

template <class T>
void write_field(char* params, const Field& field, const T& value) {
  std::memcpy(params + field.offset, &value, sizeof value);
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
  check_tensor(view, entry.dtypes, shape.rank, schema.is_written ? kWrite : kRead);
  for (int32_t d = 0; d < shape.rank; ++d) bind_letter(shape.dims[static_cast<size_t>(d)], view.sizes[d], argument, d);
  write_tensor(params, entry.field, view);
}

void Call::bind_scalar(size_t argument, char* params) {
  const Argument& entry = *op_.arguments[argument].entry;
  const int64_t value = values_[argument].scalar;
  check_scalar(op_.arguments[argument].name.c_str(), value, entry.range.min, entry.range.max);
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
      check_scalar((letter.dim == 1 ? source + " width" : source).c_str(), letter.size, range.min, range.max);
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
  if (rows != expected_rows) fail(name, "size " + std::to_string(expected_rows), "size " + std::to_string(rows));
  const Letter minimum = shape.dims[0].minimum;
  if (minimum != kNoLetter && rows < letters_[minimum].size) {
    fail(name,
         "size >= " + std::to_string(letters_[minimum].size) + " (size of " +
             op_.arguments[letters_[minimum].argument].name + ")",
         "size " + std::to_string(rows));
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
