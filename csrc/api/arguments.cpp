// Implements the checks of arguments.h.
#include "api/arguments.h"

namespace ngram_npu::api {
namespace {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kBool: return "bool";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kUInt8: return "uint8";
    case DType::kUInt16: return "uint16";
    case DType::kUInt32: return "uint32";
    case DType::kUInt64: return "uint64";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kNone: return "None";
    case DType::kOther: break;
  }
  return "an unsupported dtype";
}

std::string names_of(uint32_t dtypes) {
  std::string names;
  for (int32_t dtype = 0; dtype < static_cast<int32_t>(DType::kOther); ++dtype) {
    if ((dtypes >> dtype & 1u) != 0) names += (names.empty() ? "" : " or ") + std::string(name_of(DType{dtype}));
  }
  return names;
}

std::string name_of(const Device& device) {
  std::string name;
  switch (device.type) {
    case 0: return "cpu";
    case 1: name = "cuda"; break;
    case 20: name = "npu"; break;
    default: name = "device type " + std::to_string(device.type);
  }
  return device.index >= 0 ? name + ":" + std::to_string(device.index) : name;
}

}  // namespace

void Arguments::fail(const char* name, const std::string& expected, const std::string& got) const {
  throw ArgumentError(std::string(op_) + ": " + name + ": expected " + expected + ", got " + got);
}

void Arguments::check_tensor(const TensorView& view, uint32_t dtypes, int32_t rank, Access access,
                             const TensorView& first) const {
  const char* name = view.name;
  if ((dtypes >> static_cast<uint32_t>(view.dtype) & 1u) == 0) {
    std::string got = name_of(view.dtype);
    // The hint is for results of argmax, which are int64. It would be wrong for outputs, which must not be copies.
    if (view.dtype == DType::kInt64 && dtypes == kInt32 && access == kRead) {
      got += " (convert it: .int() in torch, .astype(numpy.int32) in numpy)";
    }
    fail(name, names_of(dtypes), got);
  }
  if (!(view.device == first.device)) {
    fail(name, "device " + name_of(first.device) + ", like " + first.name, name_of(view.device));
  }
  if (!view.aligned) fail(name, "memory aligned to the item size", "an unaligned address or stride");
  if (view.ndim != rank) fail(name, "rank " + std::to_string(rank), "rank " + std::to_string(view.ndim));
  const int32_t inner = rank - 1;
  const bool is_empty = view.sizes[0] == 0 || view.sizes[inner] == 0;  // strides of an empty tensor are arbitrary
  if (!is_empty && view.sizes[inner] > 1 && view.strides[inner] != 1) {
    fail(name, "a contiguous inner dimension", "inner stride " + std::to_string(view.strides[inner]));
  }
  if (access == kWrite && !view.writable) fail(name, "a writable array", "a read-only array");
  if (rank == 2) {
    if (view.sizes[1] > INT32_MAX) fail(name, "at most 2**31 - 1 columns", std::to_string(view.sizes[1]));
    if (view.sizes[0] > 1 && view.strides[0] < 0) {
      fail(name, "outer stride >= 0", "outer stride " + std::to_string(view.strides[0]));
    }
  }
}

void Arguments::check_size(const TensorView& view, int64_t size) const {
  if (view.sizes[0] == size) return;
  fail(view.name, "size " + std::to_string(size), "size " + std::to_string(view.sizes[0]));
}

void Arguments::check_scalar(const char* name, int64_t value, const Range& range) const {
  if (value < range.min || value > range.max) {
    fail(name, std::to_string(range.min) + " to " + std::to_string(range.max), std::to_string(value));
  }
}

void Arguments::check_at_most(const char* name, const char* quantity, int64_t value, int64_t limit,
                              const char* limit_source) const {
  if (value > limit) {
    fail(name, std::string(quantity) + " <= " + std::to_string(limit) + " (" + limit_source + ")",
         std::to_string(value));
  }
}

void Arguments::check_workspace_size(const TensorView& view, int64_t words) const {
  constexpr uintptr_t kAlignment = 16;
  if (view.sizes[0] < words) {
    fail(view.name, "size >= " + std::to_string(words) + " (for this batch)", "size " + std::to_string(view.sizes[0]));
  }
  if (const uintptr_t remainder = reinterpret_cast<uintptr_t>(view.data) % kAlignment; remainder != 0) {
    fail(view.name, "16-byte alignment", "address % 16 == " + std::to_string(remainder));
  }
}

std::string describe_status(int32_t status) {
  constexpr const char* kReasons[] = {"no error", "invalid parameters", "launch failed", "out of memory"};
  const bool is_known = status >= kOk && status <= kOutOfMemory;
  return std::string(is_known ? kReasons[status] : "unknown error") + " (status " + std::to_string(status) + ")";
}

}  // namespace ngram_npu::api
