// An index as the tools for both kinds of it take it.
#pragma once

#include <utility>

#include "python/numpy_view.h"

namespace ngram_npu::python {

inline host::TensorView index_view(const char* op, py::handle index, host::Arguments::Access access) {
  const ArrayView array(op, "index", index);
  host::Arguments(op).vector("index", *array, {host::DType::kInt32}, -1, access);
  return *array;
}

// What check(index, words, slot, tokens, num_tokens) says.
template <class Check>
int32_t check_index_row(const char* op, py::handle index, int64_t slot, py::handle tokens, const Check& check) {
  const host::TensorView view = index_view(op, index, host::Arguments::kRead);
  const ArrayView row(op, "tokens", tokens);
  host::Arguments(op).vector("tokens", *row, {host::DType::kInt32}, -1);
  return static_cast<int32_t>(check(static_cast<const int32_t*>(view.data), view.sizes[0], slot,
                                    static_cast<const int32_t*>((*row).data), (*row).sizes[0]));
}

// The header's words under their names; 0 for those that the tensor lacks.
template <size_t kCount>
py::dict header_words(const char* op, py::handle index, const std::pair<const char*, int> (&names)[kCount]) {
  const host::TensorView view = index_view(op, index, host::Arguments::kRead);
  const auto* words = static_cast<const uint32_t*>(view.data);
  py::dict found;
  for (const auto& [name, word] : names) found[name] = word < view.sizes[0] ? words[word] : 0;
  return found;
}

}  // namespace ngram_npu::python
