// Passes names and defaults of an operator's arguments from its schema (schemas.h) to pybind11.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "schemas.h"

namespace ngram_npu::numpy {

struct SchemaArgument {
  std::string name;
  pybind11::object default_value;  // null if there is none
};

template <size_t kCount>
std::array<SchemaArgument, kCount> schema_arguments(const char* op) {
  namespace py = pybind11;
  const auto value_of = [](const std::string& text) -> py::object {
    if (text == "None") return py::none();
    if (text == "True" || text == "False") return py::bool_(text == "True");
    return py::int_(std::stoll(text));
  };
  std::array<SchemaArgument, kCount> found;
  const std::string prefix = std::string(op) + "(";
  for (const std::string schema : kSchemas) {
    if (schema.compare(0, prefix.size(), prefix) != 0) continue;
    const size_t end = schema.find(") ->");
    size_t count = 0;
    for (size_t begin = prefix.size(); begin < end;) {
      const size_t stop = std::min(schema.find(", ", begin), end);
      const std::string argument = schema.substr(begin, stop - begin);  // "Tensor(a!) index", "bool overlap=False", "*"
      begin = stop + 2;
      if (argument == "*") continue;
      const size_t name = argument.rfind(' ') + 1, equals = argument.find('=');
      if (count < kCount) found[count] = {argument.substr(name, equals - name), {}};
      if (count < kCount && equals != std::string::npos) {
        found[count].default_value = value_of(argument.substr(equals + 1));
      }
      ++count;
    }
    if (count == kCount) return found;
  }
  throw std::logic_error(std::string(op) + ": the schema and the function differ in their arguments");
}

template <class Result, class... Arguments, size_t... kPlaces>
void define_operator(pybind11::module_& m, const char* op, Result (*function)(Arguments...),
                     std::index_sequence<kPlaces...>) {
  const auto arguments = schema_arguments<sizeof...(Arguments)>(op);
  m.def(op, function, arguments[kPlaces]...);
}
template <class Result, class... Arguments>
void define_operator(pybind11::module_& m, const char* op, Result (*function)(Arguments...)) {
  define_operator(m, op, function, std::index_sequence_for<Arguments...>());
}

}  // namespace ngram_npu::numpy

namespace pybind11::detail {

template <>
struct process_attribute<ngram_npu::numpy::SchemaArgument>
    : process_attribute_default<ngram_npu::numpy::SchemaArgument> {
  static void init(const ngram_npu::numpy::SchemaArgument& argument, function_record* record) {
    constexpr bool kConvert = true, kNone = true;
    record->args.emplace_back(argument.name.c_str(), nullptr, argument.default_value.inc_ref(), kConvert, kNone);
  }
};

}  // namespace pybind11::detail
