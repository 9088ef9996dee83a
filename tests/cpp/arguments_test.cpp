// Tests the argument checks that a Python test cannot reach on every machine: devices, strides, and memory shared by
// two arguments. tests/ops/test_errors.py tests the other argument checks.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api/call.h"
#include "core/drafting.h"

namespace ngram_npu::test {
namespace {

using api::ArgumentError;
using api::DType;
using api::TensorView;

template <class T>
TensorView make_view(T* data, DType dtype, int64_t size) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.item_bytes = sizeof(T);
  view.ndim = 1;
  view.sizes[0] = size;
  view.strides[0] = 1;
  return view;
}

TensorView make_view(int32_t* data, int64_t rows, int64_t columns, int64_t stride) {
  TensorView view = make_view(data, DType::kInt32, rows);
  view.ndim = 2;
  view.sizes[1] = columns;
  view.strides[0] = stride;
  view.strides[1] = 1;
  return view;
}

// A front end that runs no kernel and keeps the parameters that the kernel of ngram_step_ would get.
class ParamsRecorder final : public api::FrontEnd {
 public:
  void* allocate_result(size_t, DType, const int64_t*, int32_t) override { return nullptr; }
  void* prepare_workspace(const api::Arguments&, const void*, const TensorView* workspace) override {
    return workspace != nullptr ? workspace->data : nullptr;
  }
  Executor executor() const override { return {}; }
  void run(const void* params) override { params_ = *static_cast<const NgramStepParams*>(params); }

  const NgramStepParams& params() const { return params_; }

 private:
  NgramStepParams params_{};
};

const api::Operator& find_operator(const std::string& name) {
  const auto& all = api::operators();
  return *std::find_if(all.begin(), all.end(), [&](const api::Operator& op) { return op.name == name; });
}

constexpr int64_t kRows = 4;
constexpr int64_t kCapacity = 10;
constexpr int64_t kWidth = 3;

// Valid arguments of ngram_step_. Each test changes some of the arguments.
struct Call {
  std::vector<int32_t> tokens = std::vector<int32_t>(kRows * kCapacity * 4, 6);
  std::vector<int32_t> lengths = std::vector<int32_t>(kRows, 2);
  std::vector<int32_t> samples = std::vector<int32_t>(kRows * kWidth, 1);
  std::vector<int32_t> rows = std::vector<int32_t>(kRows, 0);
  std::vector<uint8_t> discarded = std::vector<uint8_t>(kRows, 1);
  std::vector<int32_t> scratch = std::vector<int32_t>(8, 0);

  TensorView token_ids = make_view(tokens.data(), kRows, kCapacity, kCapacity);
  TensorView num_tokens = make_view(lengths.data(), DType::kInt32, kRows);
  TensorView sampled = make_view(samples.data(), kRows, kWidth, kWidth);
  TensorView row_indices = make_view(rows.data(), DType::kInt32, kRows);
  TensorView discard = make_view(discarded.data(), DType::kBool, kRows);
  TensorView workspace = make_view(scratch.data(), DType::kInt32, 8);
  bool has_optional_tensors = true;
  int64_t min_n = 1, max_n = 3, k = 4, match_policy = kEarliest, max_len = 100;

  NgramStepParams run_step() {
    const api::Operator& op = find_operator("ngram_step_");
    std::vector<api::Value> values(op.arguments.size());
    for (size_t i = 0; i < values.size(); ++i) values[i].scalar = op.arguments[i].default_value;
    const auto set_tensor = [&](const char* name, const TensorView& view) {
      api::Value& value = values[op.find(name)];
      value.tensor = view;
      value.tensor.name = name;
      value.is_present = true;
    };
    const auto set_scalar = [&](const char* name, int64_t value) { values[op.find(name)].scalar = value; };
    set_tensor("token_ids", token_ids);
    set_tensor("num_tokens", num_tokens);
    set_tensor("sampled_token_ids", sampled);
    if (has_optional_tensors) set_tensor("discard", discard);
    if (has_optional_tensors) set_tensor("row_indices", row_indices);
    set_tensor("workspace", workspace);
    set_scalar("min_n", min_n);
    set_scalar("max_n", max_n);
    set_scalar("k", k);
    set_scalar("match_policy", match_policy);
    set_scalar("max_len", max_len);
    ParamsRecorder recorder;
    op.call(op, values.data(), recorder);
    return recorder.params();
  }
};

// Returns the error message of a call; "no error" if the call raises no error.
std::string get_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "no error";
}

// Returns the error message of ngram_step_ with changed arguments, without the operator's name.
std::string get_step_error(const std::function<void(Call&)>& change) {
  Call call;
  change(call);
  const std::string message = get_error([&] { call.run_step(); }), prefix = "ngram_step_: ";
  return message.compare(0, prefix.size(), prefix) == 0 ? message.substr(prefix.size()) : message;
}

TEST(ArgumentsTest, TensorsOnDifferentDevicesAreRejected) {
  EXPECT_EQ(get_step_error([](Call& c) { c.num_tokens.device = {1, 0}; }),
            "num_tokens: expected device cpu, like token_ids, got cuda:0");
  EXPECT_EQ(get_step_error([](Call& c) { c.row_indices.device = {20, 3}; }),
            "row_indices: expected device cpu, like token_ids, got npu:3");
  EXPECT_EQ(get_step_error([](Call& c) { c.discard.device = {7, -1}; }),
            "discard: expected device cpu, like token_ids, got device type 7");
}

TEST(ArgumentsTest, UnsupportedStridesAreRejected) {
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.strides[1] = 0; }),
            "token_ids: expected a contiguous inner dimension, got inner stride 0");
  EXPECT_EQ(get_step_error([](Call& c) { c.num_tokens.strides[0] = -1; }),
            "num_tokens: expected a contiguous inner dimension, got inner stride -1");
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.strides[0] = -kCapacity; }),
            "token_ids: expected outer stride >= 0, got outer stride -10");
}

TEST(ArgumentsTest, StrideOfDimensionWithOneElementIsIgnored) {
  Call call;
  call.token_ids = make_view(call.tokens.data(), 1, kCapacity, -7);
  call.num_tokens = make_view(call.lengths.data(), DType::kInt32, 1);
  call.num_tokens.strides[0] = 9;
  call.sampled = make_view(call.samples.data(), 1, 1, 0);
  call.sampled.strides[1] = 5;
  call.has_optional_tensors = false;
  EXPECT_EQ(call.run_step().batch, 1);
}

TEST(ArgumentsTest, ValuesOutsideTheirRangeAreRejected) {
  EXPECT_EQ(get_step_error([](Call& c) { c.sampled.sizes[1] = 66; }),
            "sampled_token_ids width: expected 1 to 65, got 66");
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.sizes[1] = int64_t{1} << 31; }),
            "token_ids: expected at most 2**31 - 1 columns, got 2147483648");
  EXPECT_EQ(get_step_error([](Call& c) { c.match_policy = (int64_t{1} << 32) + 1; }),
            "match_policy: expected 0 to 1, got 4294967297");
  Call call;
  call.min_n = call.max_n = call.k = 64;
  call.match_policy = kLatest;
  // Any value is valid, because max_len only limits how much is drafted.
  call.max_len = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(call.run_step().lookup.k, 64);
}

// Returns the error message for a written argument that shares memory with another argument.
std::string make_sharing_error(const std::string& written_name, const std::string& other_name) {
  return written_name +
         ": expected memory not shared with another argument (the tensor is an output), got memory shared with " +
         other_name;
}

TEST(ArgumentsTest, SharedMemoryOfAWrittenTensorIsRejected) {
  EXPECT_EQ(get_step_error([](Call& c) { c.sampled.data = c.tokens.data() + kRows * kCapacity - 1; }),
            make_sharing_error("token_ids", "sampled_token_ids"));
  EXPECT_EQ(get_step_error([](Call& c) { c.discard.data = reinterpret_cast<uint8_t*>(c.lengths.data()) + 15; }),
            make_sharing_error("num_tokens", "discard"));
  // Adjacent memory is not shared; two read-only arguments may share theirs.
  EXPECT_EQ(get_step_error([](Call& c) { c.num_tokens.data = c.tokens.data() + kRows * kCapacity; }), "no error");
  EXPECT_EQ(get_step_error([](Call& c) { c.row_indices.data = c.samples.data(); }), "no error");
}

TEST(ArgumentsTest, OverlappingRowsOfAWrittenTensorAreRejected) {
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.strides[0] = kCapacity - 1; }),
            "token_ids: expected rows that do not overlap (the tensor is an output), got outer stride 9");
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.strides[0] = 0; }),
            "token_ids: expected rows that do not overlap (the tensor is an output), got outer stride 0");
  EXPECT_EQ(get_step_error([](Call& c) { c.token_ids.strides[0] = kCapacity + 1; }), "no error");
  // Rows of a tensor that is only read may overlap.
  EXPECT_EQ(get_step_error([](Call& c) { c.sampled.strides[0] = 0; }), "no error");
}

// A buffer has the columns [tokens | samples]. Slices of columns are rejected only if they have a common column.
TEST(ArgumentsTest, ColumnSlicesOfOneBufferAreAcceptedWithoutCommonColumn) {
  constexpr int64_t row_stride = kCapacity + kWidth;
  const auto get_slice_error = [](int64_t tokens_offset, int64_t samples_offset) {
    return get_step_error([=](Call& c) {
      c.token_ids = make_view(c.tokens.data() + tokens_offset, kRows, kCapacity, row_stride);
      c.sampled = make_view(c.tokens.data() + samples_offset, kRows, kWidth, row_stride);
    });
  };
  EXPECT_EQ(get_slice_error(0, kCapacity), "no error");
  EXPECT_EQ(get_slice_error(kWidth + row_stride, 0), "no error");  // samples begin one row before tokens
  const std::string expected = make_sharing_error("token_ids", "sampled_token_ids");
  EXPECT_EQ(get_slice_error(0, kCapacity - 1), expected);
  EXPECT_EQ(get_slice_error(0, kCapacity + 1), expected);  // the last sample is in the next row's first token column
  EXPECT_EQ(get_slice_error(kWidth - 1, 0), expected);
}

TEST(ArgumentsTest, EmptyTensorsShareNoMemory) {
  Call call;
  call.sampled = make_view(call.tokens.data() + 3, 0, kWidth, kWidth);
  call.row_indices.sizes[0] = call.discard.sizes[0] = call.workspace.sizes[0] = 0;
  call.workspace.data = call.tokens.data() + 5;
  EXPECT_EQ(call.run_step().batch, 0);
  call.token_ids = make_view(nullptr, 0, 0, 1);
  call.num_tokens.sizes[0] = 0;
  EXPECT_EQ(call.run_step().token_ids.rows, 0);
}

}  // namespace
}  // namespace ngram_npu::test
