// Checks of arguments, shared by all operators and both front ends (torch and numpy).
//
// The checks use only properties that the host knows without waiting for a device: dtype, device, rank, sizes, strides,
// overlap and scalars. An invalid argument throws ArgumentError before anything is written. The message names the
// operator, the argument, and what was expected and received.
#pragma once

#include <stdexcept>
#include <string>

#include "api/operator.h"

namespace ngram_npu::api {

// An invalid argument. Both front ends convert this error to Python's ValueError.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

struct Device {
  int32_t type = 0;  // torch's numbering; 0 is the CPU
  int32_t index = -1;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

// The properties of a torch tensor or a numpy array that the checks need. Sizes and strides are in elements.
struct TensorView {
  const char* name = nullptr;
  void* data = nullptr;
  DType dtype = DType::kOther;
  int32_t ndim = 0;
  int64_t item_bytes = 0;
  int64_t sizes[Shape::kMaxRank] = {};  // sizes of the first dimensions
  int64_t strides[Shape::kMaxRank] = {};
  Device device;
  bool writable = true;
  bool aligned = true;  // address and strides are multiples of the item size
};

// The checks of one call. Each throws ArgumentError if an argument is invalid.
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  enum Access { kRead, kWrite };

  // Checks everything but the sizes. The device must be that of `first`, the first tensor of the call.
  void check_tensor(const TensorView& view, uint32_t dtypes, int32_t rank, Access access,
                    const TensorView& first) const;
  void check_size(const TensorView& view, int64_t size) const;  // of a vector
  void check_scalar(const char* name, int64_t value, const Range& range) const;
  void check_at_most(const char* name, const char* quantity, int64_t value, int64_t limit,
                     const char* limit_source) const;
  // Checks a workspace for a kernel that needs `words` words.
  void check_workspace_size(const TensorView& view, int64_t words) const;

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) const;

 private:
  const char* op_;
};

// Returns the text of a kernel's Status for error messages, such as "out of memory (status 3)".
std::string describe_status(int32_t status);

}  // namespace ngram_npu::api
