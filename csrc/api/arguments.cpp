// Implements the checks of arguments.h.
#include "api/arguments.h"

#include "core/correction.h"
#include "core/store.h"

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

// The address range of a view, from its first element to one past its last element.
struct Extent {
  uintptr_t begin;
  uintptr_t end;
};

int64_t row_bytes(const TensorView& view) { return (view.ndim == 2 ? view.sizes[1] : 1) * view.item_bytes; }

Extent compute_extent(const TensorView& view) {
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  for (int32_t d = 0; d < view.ndim; ++d) {
    if (view.sizes[d] == 0) return {begin, begin};
  }
  if (view.ndim == 0) return {begin, begin + static_cast<uintptr_t>(view.item_bytes)};
  const int64_t last_row_offset = (view.sizes[0] - 1) * view.strides[0] * view.item_bytes;
  return {begin, begin + static_cast<uintptr_t>(last_row_offset + row_bytes(view))};
}

// Whether two matrices are disjoint column slices of one buffer.
bool are_interleaved(const TensorView& a, const TensorView& b) {
  if (a.ndim != 2 || b.ndim != 2 || a.strides[0] * a.item_bytes != b.strides[0] * b.item_bytes) return false;
  const int64_t pitch = a.strides[0] * a.item_bytes;
  if (pitch <= 0) return false;
  const auto difference = static_cast<int64_t>(reinterpret_cast<intptr_t>(b.data) - reinterpret_cast<intptr_t>(a.data));
  const int64_t offset = ((difference % pitch) + pitch) % pitch;  // offset of b's columns from a's
  return offset >= row_bytes(a) && offset + row_bytes(b) <= pitch;
}

bool do_overlap(const TensorView& a, const TensorView& b) {
  const Extent x = compute_extent(a);
  const Extent y = compute_extent(b);
  if (x.begin == x.end || y.begin == y.end || x.end <= y.begin || y.end <= x.begin) return false;
  return !are_interleaved(a, b);
}

}  // namespace

void Arguments::fail(const char* name, const std::string& expected, const std::string& got) const {
  throw ArgumentError(std::string(op_) + ": " + name + ": expected " + expected + ", got " + got);
}

void Arguments::check_tensor(const TensorView& view, std::initializer_list<DType> dtypes, int32_t ndim, Access access) {
  const char* name = view.name;
  bool is_supported = false;
  std::string expected;
  for (DType dtype : dtypes) {
    is_supported = is_supported || dtype == view.dtype;
    expected += (expected.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  if (!is_supported) {
    std::string got = name_of(view.dtype);
    // The hint is for results of argmax, which are int64. It would be wrong for outputs, which must not be copies.
    if (view.dtype == DType::kInt64 && expected == "int32" && access == kRead) {
      got += " (convert it: .int() in torch, .astype(numpy.int32) in numpy)";
    }
    fail(name, expected, got);
  }
  if (!checked_.empty() && !(checked_.front().view.device == view.device)) {
    fail(name, "device " + name_of(checked_.front().view.device) + ", like " + checked_.front().view.name,
         name_of(view.device));
  }
  if (!view.aligned) fail(name, "memory aligned to the item size", "an unaligned address or stride");
  if (view.ndim != ndim) fail(name, "rank " + std::to_string(ndim), "rank " + std::to_string(view.ndim));
  const int32_t inner = ndim - 1;
  const bool is_empty = view.sizes[0] == 0 || view.sizes[inner] == 0;  // strides of an empty tensor are arbitrary
  if (!is_empty && view.sizes[inner] > 1 && view.strides[inner] != 1) {
    fail(name, "a contiguous inner dimension", "inner stride " + std::to_string(view.strides[inner]));
  }
  if (access == kWrite && !view.writable) fail(name, "a writable array", "a read-only array");
  checked_.push_back({view, access});
}

void Arguments::check_vector(const TensorView& view, std::initializer_list<DType> dtypes, int64_t size, Access access) {
  check_tensor(view, dtypes, 1, access);
  if (size >= 0 && view.sizes[0] != size) {
    fail(view.name, "size " + std::to_string(size), "size " + std::to_string(view.sizes[0]));
  }
}

const int32_t* Arguments::check_int32s(const TensorView& view, int64_t size) {
  check_vector(view, {DType::kInt32}, size);
  return static_cast<const int32_t*>(view.data);
}

int32_t* Arguments::check_output_int32s(const TensorView& view, int64_t size) {
  check_vector(view, {DType::kInt32}, size, kWrite);
  return static_cast<int32_t*>(view.data);
}

void Arguments::check_min_size_vector(const TensorView& view, DType dtype, int64_t min_size,
                                      const char* min_size_source, Access access) {
  check_tensor(view, {dtype}, 1, access);
  if (view.sizes[0] < min_size) {
    fail(view.name, "size >= " + std::to_string(min_size) + " (" + min_size_source + ")",
         "size " + std::to_string(view.sizes[0]));
  }
}

const int32_t* Arguments::check_query_start_loc(const TensorView& view) {
  check_min_size_vector(view, DType::kInt32, 1, "batch + 1", kRead);
  return static_cast<const int32_t*>(view.data);
}

void Arguments::check_matrix(const TensorView& view, std::initializer_list<DType> dtypes, Access access) {
  check_tensor(view, dtypes, 2, access);
  if (view.sizes[1] > INT32_MAX) fail(view.name, "at most 2**31 - 1 columns", std::to_string(view.sizes[1]));
  if (view.sizes[0] > 1 && view.strides[0] < 0) {
    fail(view.name, "outer stride >= 0", "outer stride " + std::to_string(view.strides[0]));
  }
}

TokenRows<const int32_t> Arguments::check_sampled_token_ids(const TensorView& view) {
  const auto token_rows = check_token_rows<const int32_t>(view);
  check_scalar("sampled_token_ids width", token_rows.capacity, 1, kMaxSampledWidth);
  return token_rows;
}

IndexArray Arguments::check_indices(const std::optional<TensorView>& view, int64_t size) {
  if (!view) return {nullptr, 0};
  check_vector(*view, {DType::kInt32, DType::kInt64}, size);
  return {view->data, static_cast<int32_t>(view->item_bytes)};
}

IndexArray Arguments::check_row_indices(const std::optional<TensorView>& view, const char* batch_argument,
                                        int64_t batch, int64_t limit, const char* limit_source) {
  if (!view) check_at_most(batch_argument, "batch", batch, limit, limit_source);
  return check_indices(view, batch);
}

const uint8_t* Arguments::check_mask(const std::optional<TensorView>& view, int64_t size) {
  if (!view) return nullptr;
  check_vector(*view, {DType::kBool}, size);
  return static_cast<const uint8_t*>(view->data);
}

void Arguments::check_is_none(const std::optional<TensorView>& view, const char* reason) {
  if (view) fail(view->name, std::string("None (") + reason + ")", "a tensor");
}

void Arguments::check_scalar(const char* name, int64_t value, int64_t min, int64_t max) {
  if (value < min || value > max) {
    fail(name, std::to_string(min) + " to " + std::to_string(max), std::to_string(value));
  }
}

void Arguments::check_at_most(const char* name, const char* quantity, int64_t value, int64_t limit,
                              const char* limit_source) {
  if (value > limit) {
    fail(name, std::string(quantity) + " <= " + std::to_string(limit) + " (" + limit_source + ")",
         std::to_string(value));
  }
}

LookupOptions Arguments::check_lookup(int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap,
                                      int64_t max_len, int64_t vocab_size, bool fill) {
  check_scalar("max_n", max_n, 1, kMaxNgram);
  check_scalar("min_n", min_n, 1, max_n);
  check_scalar("match_policy", match_policy, kEarliest, kLatest);
  check_scalar("k", k, 0, kMaxDraftTokens);
  return {min_n, max_n, k, max_len, vocab_size, static_cast<int32_t>(match_policy), overlap, fill};
}

DraftRows Arguments::check_draft_rows(const TensorView& view, int64_t batch) {
  check_matrix(view, {DType::kInt32, DType::kInt64}, kWrite);
  check_shape(view, batch, view.sizes[1]);
  check_scalar("draft_token_ids width", view.sizes[1], 0, kMaxDraftTokens);
  return {view.data, view.strides[0], static_cast<int32_t>(view.item_bytes)};
}

void Arguments::check_shape(const TensorView& view, int64_t rows, int64_t columns) const {
  if (view.sizes[0] == rows && view.sizes[1] == columns) return;
  const auto format = [](int64_t a, int64_t b) {
    return "shape [" + std::to_string(a) + ", " + std::to_string(b) + "]";
  };
  fail(view.name, format(rows, columns), format(view.sizes[0], view.sizes[1]));
}

// block_size * blocks_per_kv_block * cp_world and cp_world * cp_interleave must be below 2**31, so that a device can
// store these products in 32 bits.
void Arguments::check_slot_layout(const SlotLayout& layout) {
  check_scalar("block_size", layout.block_size, 1, INT32_MAX);
  check_scalar("blocks_per_kv_block", layout.blocks_per_kv_block, 1, INT32_MAX / layout.block_size);
  const int64_t kv_block = layout.block_size * layout.blocks_per_kv_block;
  check_scalar("cp_world", layout.cp_world, 1, INT32_MAX / kv_block);
  check_scalar("cp_rank", layout.cp_rank, 0, layout.cp_world - 1);
  check_scalar("cp_interleave", layout.cp_interleave, 1, INT32_MAX / layout.cp_world);
  if (layout.cp_world > 1 && kv_block % layout.cp_interleave != 0) {
    fail("cp_interleave", "a divisor of " + std::to_string(kv_block) + " (block_size * blocks_per_kv_block)",
         std::to_string(layout.cp_interleave));
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

void Arguments::check_no_overlap() const {
  for (const CheckedTensor& output : checked_) {
    if (output.access != kWrite) continue;
    const TensorView& view = output.view;
    if (view.ndim == 2 && view.sizes[0] > 1 && view.sizes[1] > 0 && view.strides[0] < view.sizes[1]) {
      fail(view.name, "rows that do not overlap (the tensor is an output)",
           "outer stride " + std::to_string(view.strides[0]));
    }
    for (const CheckedTensor& argument : checked_) {
      if (&argument != &output && do_overlap(view, argument.view)) {
        fail(view.name, "memory not shared with another argument (the tensor is an output)",
             std::string("memory shared with ") + argument.view.name);
      }
    }
  }
}

std::string describe_status(int32_t status) {
  constexpr const char* kReasons[] = {"no error", "invalid parameters", "launch failed", "out of memory"};
  const bool is_known = status >= kOk && status <= kOutOfMemory;
  return std::string(is_known ? kReasons[status] : "unknown error") + " (status " + std::to_string(status) + ")";
}

int64_t workspace_words(std::string_view op, int64_t batch) {
  if (op == "ngram_propose_" || op == "ngram_step_") return lookup_workspace_words(batch);
  if (op == "store_append_") return store_append_workspace_words(batch);
  return op == "correct_spec_state_" ? kCorrectSpecStateWorkspaceWords : -1;
}

}  // namespace ngram_npu::api
