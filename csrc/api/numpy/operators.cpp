// Defines the operators of schemas.h as Python functions on numpy arrays.
//
// pybind11 is not used to bind the arguments, because it creates and looks up a string for each keyword argument, which
// takes longer than a short lookup. Here, names are first compared by address, because Python interns keyword names.
#include <algorithm>
#include <array>
#include <deque>

#include "api/call.h"
#include "api/numpy/arrays.h"
#include "cpu/machine.h"
#include "schemas.h"

namespace ngram_npu::numpy {
namespace {

using api::OperatorArgument;

#define NGRAM_NPU_DECLARE(op, kernel) \
  NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_##kernel(const schemas::op::Params* params, void* stream);
}  // namespace
NGRAM_NPU_OPERATORS(NGRAM_NPU_DECLARE)
namespace {

using Kernel = int32_t (*)(const void* params);
#define NGRAM_NPU_KERNEL(op, kernel) \
  [](const void* params) { return ngram_npu_cpu_##kernel(static_cast<const schemas::op::Params*>(params), nullptr); },
constexpr Kernel kKernels[] = {NGRAM_NPU_OPERATORS(NGRAM_NPU_KERNEL)};

// An operator as a Python function. The objects exist until the process ends.
struct Function {
  const api::Operator* op;
  Kernel kernel;
  PyMethodDef method;
  std::array<PyObject*, api::kMaxArguments> names;  // interned
};

class NumpyFrontEnd final : public api::FrontEnd {
 public:
  explicit NumpyFrontEnd(const Function& function) : function_(function) {
    if (!function.op->results.empty()) result_ = py::tuple(function.op->results.size());
  }

  void* allocate_result(size_t index, api::DType dtype, const int64_t* sizes, int32_t rank) override {
    const auto make = [&](auto item) -> py::array {
      using Array = py::array_t<decltype(item)>;
      return rank == 2 ? Array({sizes[0], sizes[1]}) : Array(sizes[0]);
    };
    py::array array = dtype == api::DType::kInt64 ? make(int64_t{}) : make(int32_t{});
    void* const data = array.mutable_data();
    PyTuple_SET_ITEM(result_.ptr(), static_cast<Py_ssize_t>(index), array.release().ptr());
    return data;
  }

  void* prepare_workspace(const api::Arguments&, const void*, const api::TensorView*) override { return nullptr; }
  Executor executor() const override { return cpu::pool_executor(); }

  // Runs the kernel without the GIL. After the checks, a kernel can fail only because of missing memory.
  void run(const void* params) override {
    int32_t status = kOk;
    {
      const py::gil_scoped_release gil_released;
      status = function_.kernel(params);
    }
    if (status != kOk) {
      throw std::runtime_error(std::string(function_.op->kernel) +
                               ": the kernel failed: " + api::describe_status(status));
    }
  }

  // A tuple of arrays, or None.
  PyObject* release_result() { return result_.release().ptr(); }

 private:
  const Function& function_;
  py::object result_ = py::none();
};

[[noreturn]] void fail(const Function& function, const std::string& reason) {
  throw py::type_error(std::string(function.op->name) + ": " + reason);
}

std::string repr_of(PyObject* value) {
  try {
    return py::repr(value);
  } catch (const py::error_already_set&) {
    return Py_TYPE(value)->tp_name;
  }
}

// Most calls pass names in the schema's order, so the search begins where the search for the previous name ended.
size_t find_argument(const Function& function, PyObject* name, size_t begin) {
  const size_t count = function.op->arguments.size();
  for (size_t i = 0; i < count; ++i) {
    const size_t index = begin + i < count ? begin + i : begin + i - count;
    if (function.names[index] == name) return index;
  }
  for (size_t index = 0; index < count; ++index) {
    const int order = PyUnicode_Compare(function.names[index], name);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (order == 0) return index;
  }
  fail(function, std::string(py::str(name)) + ": not an argument of this operator");
}

using BoundArguments = std::array<PyObject*, api::kMaxArguments>;  // null: the argument has its default value

BoundArguments bind_arguments(const Function& function, PyObject* const* values, size_t num_positional,
                              PyObject* names) {
  const auto& arguments = function.op->arguments;
  BoundArguments bound{};
  if (num_positional > arguments.size()) {
    fail(function,
         "expected at most " + std::to_string(arguments.size()) + " arguments, got " + std::to_string(num_positional));
  }
  std::copy_n(values, num_positional, bound.begin());
  const size_t num_named = names == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(names));
  size_t index = num_positional;
  for (size_t i = 0; i < num_named; ++i) {
    index = find_argument(function, PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(i)), index);
    if (bound[index] != nullptr) fail(function, arguments[index].name + ": expected one value, got two");
    bound[index] = values[num_positional + i];
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (bound[i] == nullptr && !arguments[i].has_default) {
      fail(function, arguments[i].name + ": expected a value, got none");
    }
  }
  return bound;
}

int64_t convert_scalar(const Function& function, const OperatorArgument& argument, PyObject* value) {
  if (value == nullptr) return argument.default_value;
  const bool is_int = argument.kind == OperatorArgument::kInt;
  py::detail::make_caster<int64_t> integer;
  py::detail::make_caster<bool> boolean;
  if (!(is_int ? integer.load(value, true) : boolean.load(value, true))) {
    fail(function, argument.name + ": expected " + (is_int ? "int" : "bool") + ", got " + repr_of(value));
  }
  return is_int ? py::detail::cast_op<int64_t>(integer) : py::detail::cast_op<bool>(boolean);
}

PyObject* call_function(const Function& function, const BoundArguments& bound) {
  const auto& arguments = function.op->arguments;
  const api::Arguments call(function.op->name);
  std::array<api::Value, api::kMaxArguments> values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind == OperatorArgument::kTensor) continue;
    values[i].scalar = convert_scalar(function, arguments[i], bound[i]);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind != OperatorArgument::kTensor) continue;
    const bool is_optional = arguments[i].is_optional;
    if (is_optional && (bound[i] == nullptr || bound[i] == Py_None)) continue;
    values[i].tensor =
        view_array(call, arguments[i].name.c_str(), bound[i], is_optional ? "a numpy array or None" : "a numpy array");
    values[i].is_present = true;
  }
  NumpyFrontEnd front_end(function);
  function.op->call(*function.op, values.data(), front_end);
  return front_end.release_result();
}

PyObject* call_from_python(PyObject* self, PyObject* const* values, Py_ssize_t num_positional, PyObject* names) {
  const auto& function = *static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
  try {
    return call_function(function, bind_arguments(function, values, static_cast<size_t>(num_positional), names));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
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

// The sizes of a tensor as tuples (letter, number to add, letter of the rows that an absent tensor selects): 4 is
// ("", 4, ""), B + 1 is ("B", 1, ""), one_of(R) is ("B", 0, "R").
py::tuple describe_shape(const api::Shape& shape) {
  const auto name_of = [](api::Letter letter) {
    return letter == api::kNoLetter ? std::string() : std::string(1, api::kLetterNames[letter]);
  };
  py::tuple sizes(static_cast<size_t>(shape.rank));
  for (size_t d = 0; d < sizes.size(); ++d) {
    const api::Dim& dim = shape.dims[d];
    const int64_t number = dim.letter == api::kNoLetter ? dim.constant : dim.offset;
    sizes[d] = py::make_tuple(name_of(dim.letter), number, name_of(dim.rows));
  }
  return sizes;
}

// The shapes of an operator's arguments by name, and of its results with the argument whose dtype they have. A scalar
// that determines a letter has that letter as its shape.
py::tuple describe_shapes(const std::string& op) {
  for (const api::Operator& other : api::operators()) {
    if (op != other.name) continue;
    py::dict arguments;
    for (const OperatorArgument& argument : other.arguments) {
      arguments[argument.name.c_str()] = describe_shape(argument.entry->shape);
    }
    py::list results;
    for (const api::Result& result : other.results) {
      results.append(py::make_tuple(describe_shape(result.shape), result.like));
    }
    return py::make_tuple(arguments, results);
  }
  api::Arguments("describe_shapes").fail("op", "an operator", "'" + op + "'");
}

}  // namespace

void define_operators(py::module_& m) {
  static std::deque<Function> functions;
  for (const api::Operator& op : api::operators()) {
    Function& function = functions.emplace_back();
    function.op = &op;
    function.kernel = kKernels[functions.size() - 1];
    for (size_t i = 0; i < op.arguments.size(); ++i) {
      function.names[i] = PyUnicode_InternFromString(op.arguments[i].name.c_str());
      if (function.names[i] == nullptr) throw py::error_already_set();
    }
    function.method = {op.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_from_python)),
                       METH_FASTCALL | METH_KEYWORDS, op.schema.c_str()};
    const py::object module_name = m.attr("__name__");
    const py::capsule self(&function);
    PyObject* object = PyCFunction_NewEx(&function.method, self.ptr(), module_name.ptr());
    if (object == nullptr) throw py::error_already_set();
    m.attr(op.name) = py::reinterpret_steal<py::object>(object);
  }
  m.def("describe_shapes", describe_shapes, py::arg("op"));
}

}  // namespace ngram_npu::numpy
