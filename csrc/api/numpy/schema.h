// Creates the Python function for an operator. The schema (schemas.h) defines the arguments' names, types and defaults.
//
// pybind11 is not used to bind the arguments, because it creates and looks up a string for each keyword argument, which
// takes longer than a short lookup. Here, names are first compared by address, because Python interns keyword names.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "schemas.h"

namespace ngram_npu::numpy {

struct SchemaArgument {
  std::string type, name;
  PyObject* interned_name = nullptr;
  PyObject* default_value = nullptr;  // null if the argument has no default
};

inline const char* schema_of(const std::string& op) {
  const std::string prefix = op + "(";
  for (const char* schema : kSchemas) {
    if (std::string(schema).compare(0, prefix.size(), prefix) == 0) return schema;
  }
  throw std::logic_error(op + ": no schema");
}

template <size_t kCount>
std::array<SchemaArgument, kCount> parse_schema_arguments(const std::string& op) {
  namespace py = pybind11;
  const auto parse_default = [](const std::string& text) -> py::object {
    if (text == "None") return py::none();
    if (text == "True" || text == "False") return py::bool_(text == "True");
    return py::int_(std::stoll(text));
  };
  std::array<SchemaArgument, kCount> arguments;
  const std::string schema = schema_of(op);
  const size_t end = schema.find(") ->");
  size_t count = 0;
  for (size_t begin = op.size() + 1; begin < end;) {
    const size_t argument_end = std::min(schema.find(", ", begin), end);
    const std::string argument =
        schema.substr(begin, argument_end - begin);  // "Tensor(a!) index", "bool overlap=False", "*"
    begin = argument_end + 2;
    if (argument == "*") continue;
    if (count < kCount) {
      const size_t name_begin = argument.rfind(' ') + 1, name_end = argument.find('=');
      SchemaArgument& entry = arguments[count];
      entry.type = argument.substr(0, name_begin - 1);
      if (entry.type == "SymInt") entry.type = "int";
      entry.name = argument.substr(name_begin, name_end - name_begin);
      entry.interned_name = PyUnicode_InternFromString(entry.name.c_str());
      if (entry.interned_name == nullptr) throw py::error_already_set();
      if (name_end != std::string::npos)
        entry.default_value = parse_default(argument.substr(name_end + 1)).release().ptr();
    }
    ++count;
  }
  if (count != kCount) throw std::logic_error(op + ": the schema and the function have different numbers of arguments");
  return arguments;
}

template <auto kFunction>
class PythonOperator;

template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
class PythonOperator<kFunction> {
 public:
  static void define(pybind11::module_& m, const char* op) {
    name_ = op;
    arguments_ = parse_schema_arguments<kCount>(op);
    method_ = {name_.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
               METH_FASTCALL | METH_KEYWORDS, schema_of(op)};
    const pybind11::object module_name = m.attr("__name__");
    PyObject* function = PyCFunction_NewEx(&method_, nullptr, module_name.ptr());
    if (function == nullptr) throw pybind11::error_already_set();
    m.attr(op) = pybind11::reinterpret_steal<pybind11::object>(function);
  }

 private:
  static constexpr size_t kCount = sizeof...(Arguments);
  using BoundArguments = std::array<PyObject*, kCount>;
  template <class T>
  using Caster = pybind11::detail::make_caster<T>;

  static PyObject* call(PyObject*, PyObject* const* values, Py_ssize_t num_positional, PyObject* names) {
    try {
      return run(bind_arguments(values, static_cast<size_t>(num_positional), names),
                 std::index_sequence_for<Arguments...>());
    } catch (pybind11::error_already_set& error) {
      error.restore();
    } catch (const pybind11::builtin_exception& error) {
      error.set_error();
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }

  static BoundArguments bind_arguments(PyObject* const* values, size_t num_positional, PyObject* names) {
    BoundArguments bound_arguments{};
    if (num_positional > kCount) {
      fail("expected at most " + std::to_string(kCount) + " arguments, got " + std::to_string(num_positional));
    }
    std::copy_n(values, num_positional, bound_arguments.begin());
    const size_t num_named = names == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(names));
    size_t index = num_positional;
    for (size_t i = 0; i < num_named; ++i) {
      index = find_argument(PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(i)), index);
      if (bound_arguments[index] != nullptr) fail(arguments_[index].name + ": expected one value, got two");
      bound_arguments[index] = values[num_positional + i];
    }
    for (size_t i = 0; i < kCount; ++i) {
      if (bound_arguments[i] == nullptr) bound_arguments[i] = arguments_[i].default_value;
      if (bound_arguments[i] == nullptr) fail(arguments_[i].name + ": expected a value, got none");
    }
    return bound_arguments;
  }

  // Most calls pass names in the schema's order, so the search begins where the search for the previous name ended.
  static size_t find_argument(PyObject* name, size_t begin) {
    for (size_t i = 0; i < kCount; ++i) {
      const size_t index = begin + i < kCount ? begin + i : begin + i - kCount;
      if (arguments_[index].interned_name == name) return index;
    }
    for (size_t index = 0; index < kCount; ++index) {
      const int order = PyUnicode_Compare(arguments_[index].interned_name, name);
      if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
      if (order == 0) return index;
    }
    fail(std::string(pybind11::str(name)) + ": not an argument of this operator");
  }

  template <size_t... kIndices>
  static PyObject* run(const BoundArguments& bound_arguments, std::index_sequence<kIndices...>) {
    std::tuple<Caster<Arguments>...> casters;
    const std::array<bool, kCount> is_loaded{std::get<kIndices>(casters).load(bound_arguments[kIndices], true)...};
    const auto failed_index =
        static_cast<size_t>(std::find(is_loaded.begin(), is_loaded.end(), false) - is_loaded.begin());
    if (failed_index < kCount) {
      const SchemaArgument& argument = arguments_[failed_index];
      fail(argument.name + ": expected " + argument.type + ", got " + repr_of(bound_arguments[failed_index]));
    }
    if constexpr (std::is_void_v<Result>) {
      kFunction(pybind11::detail::cast_op<Arguments>(std::get<kIndices>(casters))...);
      Py_RETURN_NONE;
    } else {
      return Caster<Result>::cast(kFunction(pybind11::detail::cast_op<Arguments>(std::get<kIndices>(casters))...),
                                  pybind11::return_value_policy::move, {})
          .ptr();
    }
  }

  static std::string repr_of(PyObject* value) {
    try {
      return pybind11::repr(value);
    } catch (const pybind11::error_already_set&) {
      return Py_TYPE(value)->tp_name;
    }
  }

  [[noreturn]] static void fail(const std::string& reason) { throw pybind11::type_error(name_ + ": " + reason); }

  // Each operator has its own instances of these members. They exist until the process ends.
  static inline std::string name_;
  static inline std::array<SchemaArgument, kCount> arguments_;
  static inline PyMethodDef method_;
};

}  // namespace ngram_npu::numpy
