// Argument checks that Python cannot provoke on every machine: devices, strides, edges of shared memory.
// tests/ops/test_errors.py has the others.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "api/drafting.h"

namespace ngram_npu::test {
namespace {

using api::ArgumentError;
using api::DType;
using api::TensorView;

template <class T>
TensorView view(T* data, DType dtype, int64_t size) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.item_bytes = sizeof(T);
  v.ndim = 1;
  v.sizes[0] = size;
  v.strides[0] = 1;
  return v;
}

TensorView view(int32_t* data, int64_t rows, int64_t columns, int64_t stride) {
  TensorView v = view(data, DType::kInt32, rows);
  v.ndim = 2;
  v.sizes[1] = columns;
  v.strides[0] = stride;
  v.strides[1] = 1;
  return v;
}

// A front end without tensors: the body of ngram_step_ returns the parameters that its kernel would get.
class ViewCall : public api::Arguments {
 public:
  using In = const TensorView&;
  using Optional = const TensorView*;
  struct Output {};
  using Arguments::Arguments;

  TensorView view(const char* name, In tensor) const {
    TensorView named = tensor;
    named.name = name;
    return named;
  }
  std::optional<TensorView> view(const char* name, Optional tensor) const {
    if (tensor == nullptr) return std::nullopt;
    return view(name, *tensor);
  }
  static Output empty(int64_t) { return {}; }
  static Output empty(int64_t, int64_t) { return {}; }
  static int32_t* data(Output&) { return nullptr; }
  struct Memory {
    void* address;
    void* data() const { return address; }
  };
  template <class Op>
  static Memory workspace(const typename Op::Params&, const std::optional<TensorView>& view) {
    return {view ? view->data : nullptr};
  }
  template <class Op>
  void run(const typename Op::Params& params) {
    if constexpr (std::is_same_v<typename Op::Params, NgramStepParams>) params_ = params;
  }
  template <class... Outputs>
  NgramStepParams results(Outputs&...) const {
    return params_;
  }
  static Executor executor() { return {}; }

 private:
  NgramStepParams params_{};
};

constexpr int64_t kRows = 4;
constexpr int64_t kCapacity = 10;
constexpr int64_t kWidth = 3;

// Valid arguments of ngram_step_; a test makes one of them invalid.
struct Call {
  std::vector<int32_t> tokens = std::vector<int32_t>(kRows * kCapacity * 4, 6);
  std::vector<int32_t> lengths = std::vector<int32_t>(kRows, 2);
  std::vector<int32_t> samples = std::vector<int32_t>(kRows * kWidth, 1);
  std::vector<int32_t> rows = std::vector<int32_t>(kRows, 0);
  std::vector<uint8_t> discarded = std::vector<uint8_t>(kRows, 1);
  std::vector<int32_t> scratch = std::vector<int32_t>(8, 0);

  TensorView token_ids = view(tokens.data(), kRows, kCapacity, kCapacity);
  TensorView num_tokens = view(lengths.data(), DType::kInt32, kRows);
  TensorView sampled = view(samples.data(), kRows, kWidth, kWidth);
  TensorView row_indices = view(rows.data(), DType::kInt32, kRows);
  TensorView discard = view(discarded.data(), DType::kBool, kRows);
  TensorView workspace = view(scratch.data(), DType::kInt32, 8);
  bool with_optional = true;
  int64_t min_n = 1, max_n = 3, k = 4, match_policy = kEarliest, max_len = 100;

  NgramStepParams step() {
    return api::ngram_step_<ViewCall>(token_ids, num_tokens, sampled, with_optional ? &discard : nullptr,
                                      with_optional ? &row_indices : nullptr, true, 50, min_n, max_n, k, match_policy,
                                      true, max_len, nullptr, 40, false, nullptr, &workspace);
  }
};

// A call's error message; "no error" if it passes.
std::string error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "no error";
}

// The error message of ngram_step_, without the operator's name, after a change to its arguments.
std::string step_error(const std::function<void(Call&)>& change) {
  Call call;
  change(call);
  const std::string message = error([&] { call.step(); }), prefix = "ngram_step_: ";
  return message.compare(0, prefix.size(), prefix) == 0 ? message.substr(prefix.size()) : message;
}

TEST(ArgumentsTest, IndexOperatorsRejectOtherDevices) {
  Call c;
  for (TensorView* tensor : {&c.token_ids, &c.num_tokens, &c.sampled, &c.workspace, &c.row_indices}) {
    tensor->device = {1, 0};
  }
  const auto expect_error = [](const std::string& first, const auto& call) {
    EXPECT_EQ(error(call), first +
                               ": expected device cpu (the index is in host memory; on other devices, call "
                               "ngram_propose or ngram_step_, which scan), got cuda:0");
  };
  const auto append = [&] {
    api::ngram_index_append_<ViewCall>(c.token_ids, c.num_tokens, c.workspace, nullptr, nullptr, 1, 3, 0, false, false);
  };
  const TensorView& index = c.workspace;
  expect_error("ngram_index_propose_: token_ids", [&] {
    api::ngram_index_propose_<ViewCall>(c.token_ids, c.num_tokens, index, nullptr, nullptr, nullptr, 1, 3, 4, 0, false,
                                        100, false, nullptr, 40, nullptr, false, nullptr);
  });
  expect_error("ngram_index_step_: token_ids", [&] {
    api::ngram_index_step_<ViewCall>(c.token_ids, c.num_tokens, c.sampled, index, nullptr, nullptr, nullptr, true, 50,
                                     1, 3, 4, 0, false, 100, false, nullptr, 40, nullptr, false, nullptr);
  });
  expect_error("ngram_index_append_: token_ids", append);
  expect_error("ngram_index_reset_: index", [&] { api::ngram_index_reset_<ViewCall>(index, c.row_indices); });
  c.workspace.device = {};  // the index is in host memory, its rows are not
  expect_error("ngram_index_append_: token_ids", append);
}

TEST(ArgumentsTest, TensorsOnDifferentDevicesAreRejected) {
  EXPECT_EQ(step_error([](Call& c) { c.num_tokens.device = {1, 0}; }),
            "num_tokens: expected device cpu, like token_ids, got cuda:0");
  EXPECT_EQ(step_error([](Call& c) { c.row_indices.device = {20, 3}; }),
            "row_indices: expected device cpu, like token_ids, got npu:3");
  EXPECT_EQ(step_error([](Call& c) { c.discard.device = {7, -1}; }),
            "discard: expected device cpu, like token_ids, got device type 7");
}

TEST(ArgumentsTest, UnsupportedStridesAreRejected) {
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.strides[1] = 0; }),
            "token_ids: expected a contiguous inner dimension, got inner stride 0");
  EXPECT_EQ(step_error([](Call& c) { c.num_tokens.strides[0] = -1; }),
            "num_tokens: expected a contiguous inner dimension, got inner stride -1");
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.strides[0] = -kCapacity; }),
            "token_ids: expected outer stride >= 0, got outer stride -10");
}

TEST(ArgumentsTest, StrideOfADimensionOfOneElementIsIgnored) {
  Call call;
  call.token_ids = view(call.tokens.data(), 1, kCapacity, -7);
  call.num_tokens = view(call.lengths.data(), DType::kInt32, 1);
  call.num_tokens.strides[0] = 9;
  call.sampled = view(call.samples.data(), 1, 1, 0);
  call.sampled.strides[1] = 5;
  call.with_optional = false;
  EXPECT_EQ(call.step().batch, 1);
}

TEST(ArgumentsTest, ValuesOutsideTheirRangeAreRejected) {
  EXPECT_EQ(step_error([](Call& c) { c.sampled.sizes[1] = 66; }), "sampled_token_ids width: expected 1 to 65, got 66");
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.sizes[1] = int64_t{1} << 31; }),
            "token_ids: expected at most 2**31 - 1 columns, got 2147483648");
  EXPECT_EQ(step_error([](Call& c) { c.match_policy = (int64_t{1} << 32) + 1; }),
            "match_policy: expected 0 to 1, got 4294967297");
  Call limits;
  limits.min_n = limits.max_n = limits.k = 64;
  limits.match_policy = kLatest;
  limits.max_len = std::numeric_limits<int64_t>::min();  // any value: it only decides how much is drafted
  EXPECT_EQ(limits.step().lookup.k, 64);
}

std::string shared(const std::string& written, const std::string& other) {
  return written +
         ": expected memory not shared with another argument (the tensor is an output), got memory shared with " +
         other;
}

TEST(ArgumentsTest, SharedMemoryOfAWrittenTensorIsRejected) {
  EXPECT_EQ(step_error([](Call& c) { c.sampled.data = c.tokens.data() + kRows * kCapacity - 1; }),
            shared("token_ids", "sampled_token_ids"));
  EXPECT_EQ(step_error([](Call& c) { c.discard.data = reinterpret_cast<uint8_t*>(c.lengths.data()) + 15; }),
            shared("num_tokens", "discard"));
  // Adjacent memory is not shared; two read-only arguments may share theirs.
  EXPECT_EQ(step_error([](Call& c) { c.num_tokens.data = c.tokens.data() + kRows * kCapacity; }), "no error");
  EXPECT_EQ(step_error([](Call& c) { c.row_indices.data = c.samples.data(); }), "no error");
}

TEST(ArgumentsTest, OverlappingRowsOfAWrittenTensorAreRejected) {
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.strides[0] = kCapacity - 1; }),
            "token_ids: expected rows that do not overlap (the tensor is an output), got outer stride 9");
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.strides[0] = 0; }),
            "token_ids: expected rows that do not overlap (the tensor is an output), got outer stride 0");
  EXPECT_EQ(step_error([](Call& c) { c.token_ids.strides[0] = kCapacity + 1; }), "no error");
  EXPECT_EQ(step_error([](Call& c) { c.sampled.strides[0] = 0; }), "no error");  // read: one sample for all
}

// Columns of one buffer, [tokens | samples], interleave without sharing an element, until one column does.
TEST(ArgumentsTest, ColumnSlicesOfOneBufferMayInterleave) {
  constexpr int64_t pitch = kCapacity + kWidth;
  const auto error_at = [](int64_t tokens_at, int64_t samples_at) {
    return step_error([=](Call& c) {
      c.token_ids = view(c.tokens.data() + tokens_at, kRows, kCapacity, pitch);
      c.sampled = view(c.tokens.data() + samples_at, kRows, kWidth, pitch);
    });
  };
  EXPECT_EQ(error_at(0, kCapacity), "no error");
  EXPECT_EQ(error_at(kWidth + pitch, 0), "no error");  // a row further
  const std::string expected = shared("token_ids", "sampled_token_ids");
  EXPECT_EQ(error_at(0, kCapacity - 1), expected);
  EXPECT_EQ(error_at(0, kCapacity + 1), expected);  // runs into the next row's tokens
  EXPECT_EQ(error_at(kWidth - 1, 0), expected);
}

TEST(ArgumentsTest, EmptyTensorsShareNoMemory) {
  Call call;
  call.sampled = view(call.tokens.data() + 3, 0, kWidth, kWidth);
  call.row_indices.sizes[0] = call.discard.sizes[0] = call.workspace.sizes[0] = 0;
  call.workspace.data = call.tokens.data() + 5;
  EXPECT_EQ(call.step().batch, 0);
  call.token_ids = view(nullptr, 0, 0, 1);
  call.num_tokens.sizes[0] = 0;
  EXPECT_EQ(call.step().token_ids.rows, 0);
}

}  // namespace
}  // namespace ngram_npu::test
