// One call of an operator, for all operators and both front ends (torch and numpy): checks the arguments by the
// operator's table, writes them to the kernel's parameters, allocates the results, and runs the kernel.
#pragma once

#include <string_view>
#include <vector>

#include "api/arguments.h"

namespace ngram_npu::api {

constexpr size_t kMaxArguments = 24;  // of an operator

// An argument's value, as a front end passes it.
struct Value {
  TensorView tensor;
  int64_t scalar = 0;
  bool is_present = false;  // of a tensor
};

// What a front end does for a call.
class FrontEnd {
 public:
  // Allocates an uninitialised result on the device of the first tensor. Returns the address of its items.
  virtual void* allocate_result(size_t index, DType dtype, const int64_t* sizes, int32_t rank) = 0;
  // Returns the workspace for the kernel: the caller's tensor (null: not given), uninitialised memory for this call, or
  // null if the kernel needs none.
  virtual void* prepare_workspace(const Arguments& call, const void* params, const TensorView* workspace) = 0;
  // The threads for a CPU kernel.
  virtual Executor executor() const = 0;
  virtual void run(const void* params) = 0;

 protected:
  ~FrontEnd() = default;
};

// An argument of the schema.
struct OperatorArgument {
  enum Kind { kTensor, kInt, kBool };

  const Argument* entry;
  std::string name;
  Kind kind;
  bool is_optional, is_written, has_default;
  int64_t default_value;  // of a scalar; the default of a tensor is None
};

// An operator of schemas.h, parsed.
struct Operator {
  const char* name;
  const char* kernel;  // name of its kernel: ngram_npu_<backend>_<kernel>
  std::string schema;
  std::vector<OperatorArgument> arguments;
  std::vector<Size> sizes;
  std::vector<Result> results;
  Field executor, workspace;
  int64_t (*workspace_words)(int64_t batch);  // null: the operator has no argument `workspace`
  void (*call)(const Operator&, const Value* values, FrontEnd&);

  // Index of the argument, or the number of arguments if there is none with this name.
  size_t find(std::string_view argument) const;
};

// All operators, in the order of schemas.h.
const std::vector<Operator>& operators();

// Number of words (int32) of workspace that are enough for an operator and a batch on any device; -1 if the operator
// takes no workspace.
int64_t workspace_words(std::string_view op, int64_t batch);

class Call : public Arguments {
 public:
  Call(const Operator& op, const Value* values) : Arguments(op.name), op_(op), values_(values) {}

  // Checks all arguments by the table and writes them to `params`.
  void bind_arguments(void* params);
  // Checks that no written tensor overlaps another argument and that its rows do not overlap each other.
  void check_no_overlap() const;
  void run(void* params, bool has_work, FrontEnd& front_end) const;

  // For checks that the table cannot express.
  bool has(std::string_view argument) const { return values_[op_.find(argument)].is_present; }
  const TensorView& view(std::string_view argument) const { return values_[op_.find(argument)].tensor; }
  int64_t size(Letter letter) const { return letters_[letter].size; }
  // `reason` says why the tensor must be absent or present.
  void check_absent(const char* argument, const char* reason) const;
  void check_present(const char* argument, const char* reason) const;

 private:
  // The value of a letter, and the argument and the dimension that determined it.
  struct BoundLetter {
    bool is_bound = false;
    int32_t dim = 0;
    size_t argument = 0;
    int64_t size = 0;
  };

  void bind_tensor(size_t argument, char* params);
  void bind_scalar(size_t argument, char* params);
  void bind_letter(const Dim& dim, int64_t size, size_t argument, int32_t dim_index);
  void check_sizes(char* params) const;
  void check_shape(size_t argument) const;
  int64_t expected_size(const Dim& dim, int64_t size) const;

  const Operator& op_;
  const Value* values_;
  const TensorView* first_ = nullptr;  // the first tensor
  BoundLetter letters_[kNumLetters];
};

}  // namespace ngram_npu::api
