// The types of the operator table (schemas.h). One entry describes an argument: its declaration in the schema, what is
// checked, and the member of the kernel's parameters that gets it. Both front ends interpret the table (call.h),
// so an argument is described once.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/lookup_rules.h"

namespace ngram_npu::api {

// Tensors that have a letter in common agree in this size. The first argument of the schema that has the letter
// determines it.
enum Letter : int8_t { B, C, D, E, G, k, L, M, N, P, Q, R, S, T, W, kNumLetters, kNoLetter = -1 };
constexpr char kLetterNames[] = "BCDEGkLMNPQRSTW";
static_assert(sizeof kLetterNames == kNumLetters + 1);

// A size in a shape: a constant, a letter, or one of
//   B + 1        one more than the batch
//   C >= B       any size from B on, such as that of a runner's buffer
//   one_of(R)    one row index per request, [B]. If the tensor is absent, request i has row i, so B must not exceed R;
//                if no tensor determines B, B is R.
struct Dim {
  Letter letter = kNoLetter;
  int8_t offset = 0;
  Letter minimum = kNoLetter;
  Letter rows = kNoLetter;
  int64_t constant = 0;

  constexpr Dim() = default;
  constexpr Dim(Letter of) : letter(of) {}
  constexpr Dim(int64_t size) : constant(size) {}
};
constexpr Dim operator+(Letter letter, int offset) {
  Dim dim(letter);
  dim.offset = static_cast<int8_t>(offset);
  return dim;
}
constexpr Dim operator>=(Letter letter, Letter minimum) {
  Dim dim(letter);
  dim.minimum = minimum;
  return dim;
}
constexpr Dim one_of(Letter rows) {
  Dim dim(B);
  dim.rows = rows;
  return dim;
}

struct Shape {
  static constexpr int32_t kMaxRank = 2;

  std::array<Dim, kMaxRank> dims{};
  int32_t rank = 0;

  constexpr Shape() = default;
  constexpr Shape(Dim size) : dims{size}, rank(1) {}
  constexpr Shape(Dim rows, Dim columns) : dims{rows, columns}, rank(2) {}
};

// Supported dtypes: a set of bits 1 << DType.
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
enum DTypes : uint32_t {
  kBool = 1u << static_cast<int>(DType::kBool),
  kInt32 = 1u << static_cast<int>(DType::kInt32),
  kInt64 = 1u << static_cast<int>(DType::kInt64),
  kUInt8 = 1u << static_cast<int>(DType::kUInt8),
  kInt32OrInt64 = kInt32 | kInt64,
};

struct Range {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};

// A member of a Params struct, found by its offset and written according to its type.
struct Field {
  enum Kind : int8_t { kNone, kInt64, kInt32, kBool, kPointer, kIndices, kRows, kDrafts };

  Kind kind = kNone;
  int32_t offset = 0;
};

template <class T>
constexpr Field::Kind kFieldKind = Field::kNone;
template <>
inline constexpr Field::Kind kFieldKind<int64_t> = Field::kInt64;
template <>
inline constexpr Field::Kind kFieldKind<int32_t> = Field::kInt32;
template <>
inline constexpr Field::Kind kFieldKind<bool> = Field::kBool;
template <class T>
inline constexpr Field::Kind kFieldKind<T*> = Field::kPointer;
template <>
inline constexpr Field::Kind kFieldKind<IndexArray> = Field::kIndices;
template <class T>
inline constexpr Field::Kind kFieldKind<TokenRows<T>> = Field::kRows;
template <>
inline constexpr Field::Kind kFieldKind<DraftRows> = Field::kDrafts;

template <class T>
constexpr Field make_field(size_t offset) {
  static_assert(kFieldKind<T> != Field::kNone, "no argument can be written to a member of this type");
  return {kFieldKind<T>, static_cast<int32_t>(offset)};
}
// The member `path` of the operator's Params, for example lookup.min_n.
#define NGRAM_NPU_FIELD(path) \
  ::ngram_npu::api::make_field<decltype(std::declval<Params>().path)>(offsetof(Params, path))

// An argument: its declaration in the schema, and its checks.
struct Argument {
  const char* declaration;
  uint32_t dtypes = 0;
  Shape shape;    // of a tensor; a scalar may determine a letter
  Range range{};  // of a scalar
  Field field{};

  constexpr Argument(const char* separator) : declaration(separator) {}  // "*"
  constexpr Argument(const char* tensor, DTypes supported, Shape sizes, Field member)
      : declaration(tensor), dtypes(supported), shape(sizes), field(member) {}
  constexpr Argument(const char* scalar, Letter letter) : declaration(scalar), shape(letter) {}
  constexpr Argument(const char* scalar, Field member) : declaration(scalar), field(member) {}
  constexpr Argument(const char* scalar, Range limits, Field member)
      : declaration(scalar), range(limits), field(member) {}
};

// A letter that the kernel needs, or whose size is limited.
struct Size {
  Letter letter;
  Field field{};
  Range range{};

  constexpr Size(Letter name, Field member) : letter(name), field(member) {}
  constexpr Size(Letter name, Range limits, Field member = {}) : letter(name), field(member), range(limits) {}
};

// A new tensor that the operator returns: int32, or the dtype of the argument `like`.
struct Result {
  const char* name;
  Shape shape;
  Field field;
  const char* like = nullptr;
};

class Call;

// What an operator without further checks and members uses; schemas.h derives the operators from it.
template <class OperatorParams>
struct OperatorTable {
  using Params = OperatorParams;
  static constexpr std::array<Result, 0> kResults{};
  static constexpr Field kExecutor{};   // the threads for a CPU kernel
  static constexpr Field kWorkspace{};  // of a device kernel
  // Of an operator with an argument `workspace`: the number of words (int32) that are enough for a batch on any device.
  static constexpr int64_t (*count_workspace_words)(int64_t batch) = nullptr;

  // Checks what the table cannot express, and sets the members of Params that no entry of the table sets. Returns
  // whether the kernel has anything to do.
  static bool complete(const Call&, Params& p) { return p.batch > 0; }
};

}  // namespace ngram_npu::api
