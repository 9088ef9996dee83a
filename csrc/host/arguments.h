// Checking an operator's arguments, once for every backend and both front ends (torch and numpy).
//
// Everything here is what the host can see without waiting for a device: dtype, device, rank, sizes, strides, scalars,
// overlap. A violation throws ArgumentError before anything is written; the message names op, argument, expected, got.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/common.h"
#include "core/lookup.h"

namespace ngram_npu::host {

// Both front ends turn it into Python's ValueError.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

enum class DType : int32_t {
  kBool,
  kInt32,
  kInt64,
  // The others are never expected; a message names them.
  kInt8,
  kInt16,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kOther,
  kNone
};

struct Device {
  int32_t type = 0;  // torch's numbering; 0 is the CPU
  int32_t index = -1;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

// What the checks need to know of a torch tensor or a numpy array. Sizes and strides are in elements.
struct TensorView {
  static constexpr int32_t kMaxDim = 2;

  void* data = nullptr;
  DType dtype = DType::kOther;
  int64_t item_bytes = 0;
  int32_t ndim = 0;
  int64_t sizes[kMaxDim] = {};  // the first kMaxDim
  int64_t strides[kMaxDim] = {};
  Device device;
  bool writable = true;
  bool aligned = true;  // address and strides are multiples of the item size
};

class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  enum Access { kRead, kWrite };

  // Every tensor must live on the device of the first one checked. The size -1 stands for any.
  void vector(const char* name, const TensorView& view, std::initializer_list<DType> dtypes, int64_t size,
              Access access = kRead);
  void matrix(const char* name, const TensorView& view, DType dtype, Access access = kRead);
  // A vector of `low` items or more; `what` says what they are one for.
  void vector_of_at_least(const char* name, const TensorView& view, std::initializer_list<DType> dtypes, int64_t low,
                          const char* what, Access access = kRead);
  // A vector of int32 that is read, as the kernels take it.
  const int32_t* int32s(const char* name, const TensorView& view, int64_t size);
  // Where requests start in the flat batch. Returns the number of requests, which -1 leaves open.
  int64_t query_start_loc(const TensorView& view, int64_t batch);

  IndexArray indices(const char* name, const TensorView* view, int64_t size);
  const uint8_t* mask(const char* name, const TensorView* view, int64_t size);
  void scalar(const char* name, int64_t value, int64_t low, int64_t high);
  void absent(const char* name, const TensorView* view, const char* because);
  void at_most(const char* name, const char* what, int64_t value, int64_t limit, const char* of);
  void ngram_range(int64_t min_n, int64_t max_n, int64_t match_policy);
  void index_span(int64_t min_n, int64_t max_n);
  LookupOptions lookup(int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap, int64_t max_len);

  // A tensor that is written may share memory neither with another argument nor with itself. Call it last.
  void disjoint() const;

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) const;

 private:
  struct Seen {
    const char* name;
    TensorView view;
    Access access;
  };

  void tensor(const char* name, const TensorView& view, std::initializer_list<DType> dtypes, int32_t ndim,
              Access access);

  const char* op_;
  std::vector<Seen> seen_;
};

template <class Token>
TokenRows<Token> token_rows(const TensorView& view) {
  return {static_cast<Token*>(view.data), view.sizes[0], view.sizes[1], view.strides[0]};
}

}  // namespace ngram_npu::host
