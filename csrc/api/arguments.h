// Checks of an operator's arguments, shared by all backends and both front ends (torch and numpy).
//
// The checks use only properties that the host knows without waiting for a device: dtype, device, rank, sizes, strides,
// overlap and scalars. An invalid argument throws ArgumentError before anything is written. The message names the
// operator, the argument, and what was expected and received.
#pragma once

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/common.h"
#include "core/correction.h"
#include "core/drafting.h"

namespace ngram_npu::api {

constexpr int64_t kAnySize = -1;  // for the parameter `size` of the checks: every size is valid

// An invalid argument. Both front ends convert this error to Python's ValueError.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

enum class DType : int32_t {
  kBool,
  kInt32,
  kInt64,
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

// The properties of a torch tensor or a numpy array that the checks need. Sizes and strides are in elements.
struct TensorView {
  static constexpr int32_t kMaxDim = 2;

  const char* name = nullptr;
  void* data = nullptr;
  DType dtype = DType::kOther;
  int64_t item_bytes = 0;
  int32_t ndim = 0;
  int64_t sizes[kMaxDim] = {};  // sizes of the first kMaxDim dimensions
  int64_t strides[kMaxDim] = {};
  Device device;
  bool writable = true;
  bool aligned = true;  // address and strides are multiples of the item size
};

// The argument checks of one call. Each check throws ArgumentError; many also return the checked argument.
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  const char* op() const { return op_; }

  enum Access { kRead, kWrite };

  // Every tensor must be on the device of the first checked tensor. Size -1 means any size.
  void check_vector(const TensorView& view, std::initializer_list<DType> dtypes, int64_t size, Access access = kRead);
  const int32_t* check_int32s(const TensorView& view, int64_t size);
  int32_t* check_output_int32s(const TensorView& view, int64_t size);
  // Checks an output vector with at least `min_size` items; the error message names `min_size_source` as the reason for
  // the minimum.
  template <class T>
  T* check_output_vector(const TensorView& view, DType dtype, int64_t min_size, const char* min_size_source) {
    check_min_size_vector(view, dtype, min_size, min_size_source, kWrite);
    return static_cast<T*>(view.data);
  }
  // Checks query_start_loc, which has at least one item (batch + 1).
  const int32_t* check_query_start_loc(const TensorView& view);
  void check_matrix(const TensorView& view, std::initializer_list<DType> dtypes, Access access = kRead);
  // Checks an int32 matrix.
  template <class Token>
  TokenRows<Token> check_token_rows(const TensorView& view, Access access = kRead) {
    check_matrix(view, {DType::kInt32}, access);
    return {static_cast<Token*>(view.data), view.sizes[0], view.sizes[1], view.strides[0]};
  }
  TokenRows<const int32_t> check_sampled_token_ids(const TensorView& view);

  void check_shape(const TensorView& view, int64_t rows, int64_t columns) const;
  IndexArray check_indices(const std::optional<TensorView>& view, int64_t size);
  // Checks the row index of each request. If the tensor is absent, request i has row i, so the batch must not exceed
  // `limit`. The error message names the argument that has the batch's size, and the source of the limit.
  IndexArray check_row_indices(const std::optional<TensorView>& view, const char* batch_argument, int64_t batch,
                               int64_t limit, const char* limit_source);
  const uint8_t* check_mask(const std::optional<TensorView>& view, int64_t size);
  void check_is_none(const std::optional<TensorView>& view, const char* reason);

  void check_scalar(const char* name, int64_t value, int64_t min, int64_t max);
  void check_at_most(const char* name, const char* quantity, int64_t value, int64_t limit, const char* limit_source);
  LookupOptions check_lookup(int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap,
                             int64_t max_len, int64_t vocab_size, bool fill);
  // Checks an output of draft token ids: [batch, any], int32 or int64.
  DraftRows check_draft_rows(const TensorView& view, int64_t batch);
  void check_slot_layout(const SlotLayout& layout);
  // Checks a workspace for a kernel that needs `words` words.
  void check_workspace_size(const TensorView& view, int64_t words) const;

  // Checks that no output tensor overlaps another argument and that the rows of an output do not overlap each other.
  // This check must be the last of a call.
  void check_no_overlap() const;

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) const;

 private:
  struct CheckedTensor {
    TensorView view;
    Access access;
  };

  void check_tensor(const TensorView& view, std::initializer_list<DType> dtypes, int32_t ndim, Access access);
  void check_min_size_vector(const TensorView& view, DType dtype, int64_t min_size, const char* min_size_source,
                             Access access);

  const char* op_;
  std::vector<CheckedTensor> checked_;
};

// Returns the text of a kernel's Status for error messages, such as "out of memory (status 3)".
std::string describe_status(int32_t status);

// Number of words (int32) of workspace that are enough for an operator and a batch on any device; -1 if the operator
// takes no workspace.
int64_t workspace_words(std::string_view op, int64_t batch);

// Interface that a front end F (torch or numpy) provides to the operators in the other headers of this folder, which
// check the arguments, allocate the outputs and call the kernel. F derives from Arguments; one F object is one call.
//   In, Optional            type of a tensor argument, and of a tensor argument that may be absent
//   Output                  a new int32 tensor on the device of the first argument
//   TensorView view(name, In), optional<TensorView> view(name, Optional)   the properties of an argument
//   Output empty(sizes...), int32_t* data(Output&)   an uninitialised output, and the address of its items
//   empty_tokens(item_bytes, rows, columns), void* tokens(...)   the same for token ids, int32 or int64
//   workspace<Op>(params, optional view)   workspace of Op's kernel; its data() is null if the kernel needs none
//   run<Op>(params)         calls Op's kernel for the device
//   results(Output&...)     the operator's return value
//   static Executor executor()   the threads for a CPU kernel

template <class F>
using In = typename F::In;
template <class F>
using Optional = typename F::Optional;

// Checks the rows of a step, which contain the sampled tokens already.
template <class Params, class F>
void check_grown_rows(F& call, Params& p, In<F> token_ids, In<F> num_tokens, In<F> num_sampled,
                      Optional<F> row_indices) {
  p.token_ids = call.template check_token_rows<const int32_t>(call.view("token_ids", token_ids));
  p.num_tokens = call.check_int32s(call.view("num_tokens", num_tokens), p.token_ids.rows);
  const TensorView sampled = call.view("num_sampled", num_sampled);
  p.num_sampled = call.check_int32s(sampled, kAnySize);
  p.batch = sampled.sizes[0];
  p.row_indices = call.check_row_indices(call.view("row_indices", row_indices), "num_sampled", p.batch,
                                         p.token_ids.rows, "number of rows of token_ids, because row_indices is None");
}

// Defines op##_op (of the operator `merge_drafts_`: merge_drafts__op): its parameters, name and CPU kernel.
#define NGRAM_NPU_OPERATOR(op, OpParams)                               \
  NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_##op(const OpParams*, void*); \
  struct op##_op {                                                     \
    using Params = OpParams;                                           \
    static constexpr const char* kName = #op;                          \
    static constexpr auto kCpuKernel = ngram_npu_cpu_##op;             \
  };

}  // namespace ngram_npu::api
