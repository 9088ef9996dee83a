// The argument checks that Python cannot provoke on every machine: devices, strides, the edges of shared memory. The
// others are in tests/ops/test_errors.py.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "api/drafting.h"

namespace ngram_npu::test {
namespace {

using api::ArgumentError;
using api::DType;
using api::TensorView;

template <class T>
TensorView view(T* data, DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.item_bytes = sizeof(T);
  v.ndim = 2;
  v.sizes[0] = rows;
  v.sizes[1] = columns;
  v.strides[0] = stride;
  v.strides[1] = 1;
  return v;
}

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

// A front end without tensors: an operator's body returns the parameters that its kernel would get.
class ViewCall : public api::Arguments {
 public:
  using Params = std::tuple<NgramProposeParams, NgramStepParams, NgramIndexProposeParams, NgramIndexStepParams,
                            NgramIndexAppendParams, NgramIndexResetParams>;
  using In = const TensorView&;
  using Optional = const TensorView*;
  struct Output {};
  using Arguments::Arguments;

  TensorView operator()(const char* name, In given) const {
    TensorView named = given;
    named.name = name;
    return named;
  }
  std::optional<TensorView> operator()(const char* name, Optional given) const {
    if (given == nullptr) return std::nullopt;
    return (*this)(name, *given);
  }
  static Output empty(int64_t) { return {}; }
  static Output empty(int64_t, int64_t) { return {}; }
  static int32_t* data(Output&) { return nullptr; }
  struct Memory {
    void* address;
    void* data() const { return address; }
  };
  template <class Op>
  static Memory workspace(const typename Op::Params&, const std::optional<TensorView>& given) {
    return {given ? given->data : nullptr};
  }
  template <class Op>
  void run(const typename Op::Params& params) {
    std::get<typename Op::Params>(params_) = params;
  }
  template <class... Outputs>
  Params results(Outputs&...) const {
    return params_;
  }
  static Executor executor() { return {}; }

 private:
  Params params_;
};

constexpr int64_t kRows = 4;
constexpr int64_t kCapacity = 10;
constexpr int64_t kWidth = 3;

// Valid arguments of both ops over memory of their own; a test spoils one of them.
struct Call {
  std::vector<int32_t> tokens = std::vector<int32_t>(kRows * kCapacity * 4, 6);
  std::vector<int32_t> lengths = std::vector<int32_t>(kRows, 2);
  std::vector<int32_t> samples = std::vector<int32_t>(kRows * kWidth, 1);
  std::vector<int32_t> index32 = std::vector<int32_t>(kRows, 0);
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kRows, 1);
  std::vector<int32_t> counted = std::vector<int32_t>(kRows, 1);
  std::vector<int32_t> scratch = std::vector<int32_t>(8, 0);

  TensorView token_ids = view(tokens.data(), DType::kInt32, kRows, kCapacity, kCapacity);
  TensorView num_tokens = view(lengths.data(), DType::kInt32, kRows);
  TensorView sampled = view(samples.data(), DType::kInt32, kRows, kWidth, kWidth);
  TensorView row_indices = view(index32.data(), DType::kInt32, kRows);
  TensorView mask = view(bytes.data(), DType::kBool, kRows);       // discard
  TensorView counts = view(counted.data(), DType::kInt32, kRows);  // num_sampled
  TensorView workspace = view(scratch.data(), DType::kInt32, 8);
  bool with_row_indices = true;
  bool with_mask = true;
  bool with_workspace = true;
  int64_t min_n = 1, max_n = 3, k = 4, match_policy = kEarliest, max_len = 100;

  NgramProposeParams propose() {
    return std::get<NgramProposeParams>(api::ngram_propose<ViewCall>(
        token_ids, num_tokens, with_row_indices ? &row_indices : nullptr, with_mask ? &counts : nullptr, min_n, max_n,
        k, match_policy, true, max_len, nullptr, 40, false));
  }

  NgramStepParams step() {
    return std::get<NgramStepParams>(
        api::ngram_step_<ViewCall>(token_ids, num_tokens, sampled, with_mask ? &mask : nullptr,
                                   with_row_indices ? &row_indices : nullptr, true, 50, min_n, max_n, k, match_policy,
                                   true, max_len, nullptr, 40, false, nullptr, with_workspace ? &workspace : nullptr));
  }
};

enum Op { kPropose, kStep };

// A call's error message; "no error" if it passes.
std::string error(const std::function<void()>& call) {
  try {
    call();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "no error";
}

std::string error(Op op, const std::function<void(Call&)>& spoil) {
  Call call;
  spoil(call);
  return error([&] { op == kPropose ? static_cast<void>(call.propose()) : static_cast<void>(call.step()); });
}

// The same violation of an argument that both ops have.
void both(const std::function<void(Call&)>& spoil, const std::string& message) {
  EXPECT_EQ(error(kPropose, spoil), "ngram_propose: " + message);
  EXPECT_EQ(error(kStep, spoil), "ngram_step_: " + message);
}

// The error of each operator of the index, with all of its tensors on another device.
TEST(ArgumentsTest, TheIndexIsOnTheHost) {
  Call c;
  for (TensorView* tensor : {&c.token_ids, &c.num_tokens, &c.sampled, &c.workspace, &c.row_indices}) {
    tensor->device = {1, 0};
  }
  const auto refused = [](const std::string& first, const auto& call) {
    EXPECT_EQ(error(call),
              first + ": expected device cpu (the index is in host memory; other devices scan), got cuda:0");
  };
  const auto append = [&] {
    api::ngram_index_append_<ViewCall>(c.token_ids, c.num_tokens, c.workspace, nullptr, nullptr, 1, 3, 0, false, false);
  };
  const TensorView& index = c.workspace;
  refused("ngram_index_propose_: token_ids", [&] {
    api::ngram_index_propose_<ViewCall>(c.token_ids, c.num_tokens, index, nullptr, nullptr, nullptr, 1, 3, 4, 0, false,
                                        100, false, nullptr, 40, nullptr, false, nullptr);
  });
  refused("ngram_index_step_: token_ids", [&] {
    api::ngram_index_step_<ViewCall>(c.token_ids, c.num_tokens, c.sampled, index, nullptr, nullptr, nullptr, true, 50,
                                     1, 3, 4, 0, false, 100, false, nullptr, 40, nullptr, false, nullptr);
  });
  refused("ngram_index_append_: token_ids", append);
  refused("ngram_index_reset_: index", [&] { api::ngram_index_reset_<ViewCall>(index, c.row_indices); });
  c.workspace.device = {};  // an index where it belongs, and rows that are elsewhere
  refused("ngram_index_append_: token_ids", append);
}

TEST(ArgumentsTest, Devices) {
  both([](Call& c) { c.num_tokens.device = {1, 0}; }, "num_tokens: expected device cpu as token_ids, got cuda:0");
  both([](Call& c) { c.row_indices.device = {20, 3}; }, "row_indices: expected device cpu as token_ids, got npu:3");
  both([](Call& c) { c.token_ids.device = {1, 1}; }, "num_tokens: expected device cuda:1 as token_ids, got cpu");
  both(
      [](Call& c) {
        c.token_ids.device = {1, 1};
        c.num_tokens.device = {1, 0};
      },
      "num_tokens: expected device cuda:1 as token_ids, got cuda:0");
  EXPECT_EQ(error(kPropose, [](Call& c) { c.counts.device = {7, -1}; }),
            "ngram_propose: num_sampled: expected device cpu as token_ids, got device type 7");
}

TEST(ArgumentsTest, Strides) {
  both([](Call& c) { c.token_ids.strides[1] = 0; },
       "token_ids: expected a contiguous inner dimension, got inner stride 0");
  both([](Call& c) { c.num_tokens.strides[0] = -1; },
       "num_tokens: expected a contiguous inner dimension, got inner stride -1");
  both([](Call& c) { c.token_ids.strides[0] = -kCapacity; }, "token_ids: expected an outer stride >= 0, got -10");
}

// The stride of a dimension of at most one element means nothing.
TEST(ArgumentsTest, StridesThatDoNotMatter) {
  Call call;
  call.token_ids = view(call.tokens.data(), DType::kInt32, 1, kCapacity, -7);
  call.num_tokens = view(call.lengths.data(), DType::kInt32, 1);
  call.num_tokens.strides[0] = 9;
  call.sampled = view(call.samples.data(), DType::kInt32, 1, 1, 0);
  call.sampled.strides[1] = 5;
  call.with_row_indices = call.with_mask = false;
  EXPECT_EQ(call.step().batch, 1);
}

TEST(ArgumentsTest, Limits) {
  EXPECT_EQ(error(kStep, [](Call& c) { c.sampled.sizes[1] = 66; }),
            "ngram_step_: sampled_token_ids width: expected 1 to 65, got 66");
  both([](Call& c) { c.token_ids.sizes[1] = int64_t{1} << 31; },
       "token_ids: expected rows shorter than 2**31, got 2147483648");
  both([](Call& c) { c.min_n = c.max_n = std::numeric_limits<int64_t>::min(); },
       "max_n: expected 1 to 64, got -9223372036854775808");
  both([](Call& c) { c.match_policy = (int64_t{1} << 32) + 1; }, "match_policy: expected 0 to 1, got 4294967297");
  Call limits;
  limits.min_n = limits.max_n = limits.k = 64;
  limits.match_policy = kLatest;
  limits.max_len = std::numeric_limits<int64_t>::min();  // any value: it only decides how much is drafted
  EXPECT_EQ(limits.propose().lookup.k, 64);
}

TEST(ArgumentsTest, WrittenMemoryIsShared) {
  const auto shared = [](const char* written, const char* other) {
    return std::string("ngram_step_: ") + written +
           ": expected memory not shared with another argument (it is written), got memory shared with " + other;
  };
  EXPECT_EQ(error(kStep, [](Call& c) { c.num_tokens.data = c.tokens.data() + 35; }), shared("token_ids", "num_tokens"));
  EXPECT_EQ(error(kStep, [](Call& c) { c.sampled.data = c.tokens.data() + kRows * kCapacity - 1; }),
            shared("token_ids", "sampled_token_ids"));
  EXPECT_EQ(error(kStep, [](Call& c) { c.row_indices.data = c.tokens.data(); }), shared("token_ids", "row_indices"));
  EXPECT_EQ(error(kStep, [](Call& c) { c.row_indices.data = c.lengths.data(); }), shared("num_tokens", "row_indices"));
  EXPECT_EQ(error(kStep, [](Call& c) { c.mask.data = reinterpret_cast<uint8_t*>(c.lengths.data()) + 15; }),
            shared("num_tokens", "discard"));
  EXPECT_EQ(error(kStep, [](Call& c) { c.workspace.data = c.samples.data() + 4; }),
            shared("workspace", "sampled_token_ids"));
  // Adjacent memory is not shared; two read-only arguments may share theirs.
  EXPECT_EQ(error(kStep, [](Call& c) { c.num_tokens.data = c.tokens.data() + kRows * kCapacity; }), "no error");
  EXPECT_EQ(error(kStep, [](Call& c) { c.row_indices.data = c.samples.data(); }), "no error");
  EXPECT_EQ(error(kPropose, [](Call& c) { c.num_tokens.data = c.row_indices.data = c.tokens.data(); }), "no error");
}

TEST(ArgumentsTest, RowsThatOverlapThemselves) {
  EXPECT_EQ(error(kStep, [](Call& c) { c.token_ids.strides[0] = kCapacity - 1; }),
            "ngram_step_: token_ids: expected rows that do not overlap (it is written), got outer stride 9");
  EXPECT_EQ(error(kStep, [](Call& c) { c.token_ids.strides[0] = 0; }),
            "ngram_step_: token_ids: expected rows that do not overlap (it is written), got outer stride 0");
  EXPECT_EQ(error(kStep, [](Call& c) { c.token_ids.strides[0] = kCapacity + 1; }), "no error");
  EXPECT_EQ(error(kStep, [](Call& c) { c.sampled.strides[0] = 0; }), "no error");  // read: one sample for all
  EXPECT_EQ(error(kPropose, [](Call& c) { c.token_ids.strides[0] = 0; }), "no error");
}

// Columns of one buffer: [tokens | samples] interleave without sharing an element, until one column does.
TEST(ArgumentsTest, ColumnSlicesOfOneBuffer) {
  const int64_t pitch = kCapacity + kWidth;
  const auto columns = [pitch](int64_t tokens_at, int64_t samples_at) {
    return [=](Call& c) {
      c.token_ids = view(c.tokens.data() + tokens_at, DType::kInt32, kRows, kCapacity, pitch);
      c.sampled = view(c.tokens.data() + samples_at, DType::kInt32, kRows, kWidth, pitch);
    };
  };
  EXPECT_EQ(error(kStep, columns(0, kCapacity)), "no error");
  EXPECT_EQ(error(kStep, columns(kWidth, 0)), "no error");
  EXPECT_EQ(error(kStep, columns(0, kCapacity + pitch)), "no error");  // the same columns, a row further
  EXPECT_EQ(error(kStep, columns(kWidth + pitch, 0)), "no error");
  const std::string shared =
      "ngram_step_: token_ids: expected memory not shared with another argument (it is written), got memory shared "
      "with sampled_token_ids";
  EXPECT_EQ(error(kStep, columns(0, kCapacity - 1)), shared);
  EXPECT_EQ(error(kStep, columns(0, kCapacity + 1)), shared);  // runs into the next row's tokens
  EXPECT_EQ(error(kStep, columns(kWidth - 1, 0)), shared);
  EXPECT_EQ(error(kStep, columns(0, 0)), shared);
  EXPECT_EQ(error(kStep, columns(1, 0)), shared);
  EXPECT_EQ(error(kStep, columns(pitch, kCapacity - 1)), shared);
}

// A tensor without elements shares nothing, wherever it points.
TEST(ArgumentsTest, EmptyTensorsShareNothing) {
  Call call;
  call.sampled = view(call.tokens.data() + 3, DType::kInt32, 0, kWidth, kWidth);
  call.row_indices.sizes[0] = call.mask.sizes[0] = call.counts.sizes[0] = call.workspace.sizes[0] = 0;
  call.workspace.data = call.tokens.data() + 5;
  EXPECT_EQ(call.step().batch, 0);
  call.token_ids = view<int32_t>(nullptr, DType::kInt32, 0, 0, 1);
  call.num_tokens.sizes[0] = 0;
  EXPECT_EQ(call.step().token_ids.rows, 0);
}

}  // namespace
}  // namespace ngram_npu::test
