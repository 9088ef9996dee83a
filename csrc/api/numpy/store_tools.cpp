// numpy bindings that create, check, copy and clear a store, for NgramStore (python/ngram_npu/store/store.py).
#include <pybind11/stl.h>

#include <optional>
#include <string_view>
#include <utility>

#include "api/numpy/numpy_call.h"
#include "cpu/ngram_store.h"

namespace ngram_npu::numpy {
namespace {

// Checks that `store` is an int32 vector. Returns the vector's data and size.
std::pair<int32_t*, int64_t> check_store_words(const char* op, py::handle store, api::Arguments::Access access) {
  NumpyCall call(op);
  const api::TensorView view = call.view("store", store);
  call.check_vector(view, {api::DType::kInt32}, -1, access);
  return {static_cast<int32_t*>(view.data), view.sizes[0]};
}

std::array<int64_t, 6> compute_part_offsets(int64_t num_slots, int64_t num_blocks, int64_t line_bits) {
  std::array<int64_t, 6> offsets;
  ngram_npu_cpu_ngram_store_parts(num_slots, num_blocks, line_bits, offsets.data());
  return offsets;
}

int64_t count_store_words(int64_t num_slots, int64_t num_blocks, int64_t line_bits) {
  return compute_part_offsets(num_slots, num_blocks, line_bits).back();
}

// Returns the begin and the end of each part of the tensor, in words.
py::dict get_store_parts(int64_t num_slots, int64_t num_blocks, int64_t line_bits) {
  const auto offsets = compute_part_offsets(num_slots, num_blocks, line_bits);
  constexpr const char* kNames[] = {"slots", "heads", "lines", "tokens", "bytes"};
  py::dict ranges;
  for (size_t i = 0; i < 5; ++i) ranges[kNames[i]] = py::make_tuple(offsets[i], offsets[i + 1]);
  return ranges;
}

void init_store(py::handle store, int64_t num_slots, int64_t num_blocks, int64_t line_bits, int64_t visibility) {
  constexpr const char* op = "store_init";
  const auto [words, size] = check_store_words(op, store, api::Arguments::kWrite);
  api::Arguments(op).check_scalar("visibility", visibility, store::kLive, store::kFinish);
  if (ngram_npu_cpu_ngram_store_init(words, size, num_slots, num_blocks, line_bits,
                                     static_cast<uint32_t>(visibility)) != kOk) {
    api::Arguments(op).fail("store",
                            "enough words for " + std::to_string(num_slots) + " slots, " + std::to_string(num_blocks) +
                                " blocks and 2**" + std::to_string(line_bits) + " lines",
                            std::to_string(size) + " words");
  }
}

// Returns the index of the fault in STORE_FAULTS, and the slot, block or line that has the fault.
std::pair<int32_t, int64_t> check_store(py::handle store) {
  const auto [words, size] = check_store_words("store_check", store, api::Arguments::kRead);
  int64_t location = 0;
  const int32_t fault = ngram_npu_cpu_ngram_store_check(words, size, &location);
  return {fault, location};
}

py::dict get_store_statistics(py::handle store) {
  const auto [words, size] = check_store_words("store_statistics", store, api::Arguments::kRead);
  constexpr std::pair<const char*, int> kWords[] = {
      {"num_slots", store::kHeaderSlots},
      {"num_blocks", store::kHeaderBlocks},
      {"line_bits", store::kHeaderLineBits},
      {"visibility", store::kHeaderVisibility},
      {"lookups", store::kStatLookups},
      {"hits", store::kStatHits},
      {"drafts", store::kStatDrafts},
      {"draft_tokens", store::kStatTokens},
      {"tokens_inserted", store::kStatInserted},
      {"entries_evicted", store::kStatEvicted},
      {"blocks_lost", store::kStatLostBlocks},
      {"renumberings", store::kStatRenumberings},
      {"calls_skipped", store::kStatSkippedCalls},
  };
  py::dict statistics;
  for (const auto& [name, word] : kWords) statistics[name] = word < size ? static_cast<uint32_t>(words[word]) : 0;
  int64_t usage[3];
  ngram_npu_cpu_ngram_store_usage(words, size, usage);
  statistics["tokens_held"] = usage[0];
  statistics["blocks_in_use"] = usage[1];
  statistics["open_slots"] = usage[2];
  return statistics;
}

bool lock_store(py::handle store) {
  const auto [words, size] = check_store_words("store_lock", store, api::Arguments::kWrite);
  return ngram_npu_cpu_ngram_store_lock(words, size);
}

void unlock_store(py::handle store) {
  const auto [words, size] = check_store_words("store_unlock", store, api::Arguments::kWrite);
  ngram_npu_cpu_ngram_store_unlock(words, size);
}

int64_t count_pieces(py::handle store) {
  const auto [words, size] = check_store_words("store_pieces", store, api::Arguments::kRead);
  return ngram_npu_cpu_ngram_store_pieces(words, size);
}

// Copies a piece of the store to `buffer`. Returns the number of words; None if another call is using the store.
std::optional<int64_t> pack_store_piece(py::handle store, int64_t piece, py::handle buffer) {
  const auto [words, size] = check_store_words("store_pack", store, api::Arguments::kWrite);
  NumpyCall call("store_pack");
  call.check_scalar("piece", piece, 0, larger(ngram_npu_cpu_ngram_store_pieces(words, size) - 1, int64_t{0}));
  const api::TensorView buffer_view = call.view("to", buffer);
  call.check_vector(buffer_view, {api::DType::kInt32}, kStorePieceWords, api::Arguments::kWrite);
  const py::gil_scoped_release gil_released;
  const int64_t count = ngram_npu_cpu_ngram_store_pack(words, size, piece, static_cast<uint32_t*>(buffer_view.data));
  return count < 0 ? std::nullopt : std::optional(count);
}

// Adds a piece to the store. Returns the index of the fault in STORE_FAULTS.
int32_t unpack_store_piece(py::handle store, int64_t piece, const py::bytes& packed) {
  const auto [words, size] = check_store_words("store_unpack", store, api::Arguments::kWrite);
  const std::string_view bytes(packed);  // Python aligns the contents of a bytes object to 8 bytes
  if (bytes.size() % sizeof(uint32_t) != 0) return kStoreFaultPiece;
  const auto* packed_words = reinterpret_cast<const uint32_t*>(bytes.data());
  return ngram_npu_cpu_ngram_store_unpack(words, size, piece, packed_words,
                                          static_cast<int64_t>(bytes.size() / sizeof(uint32_t)));
}

void clear_store(py::handle store, std::optional<int64_t> scope) {
  const auto [words, size] = check_store_words("store_clear", store, api::Arguments::kWrite);
  ngram_npu_cpu_ngram_store_clear(words, size, scope ? &*scope : nullptr);
}

int64_t mark_update(py::handle store) {
  const auto [words, size] = check_store_words("store_mark_update", store, api::Arguments::kWrite);
  return ngram_npu_cpu_ngram_store_mark_update(words, size);
}

void drop_store_text(py::handle store, int64_t mark) {
  const auto [words, size] = check_store_words("store_drop", store, api::Arguments::kWrite);
  ngram_npu_cpu_ngram_store_drop(words, size, mark);
}

}  // namespace

void define_store_tools(py::module_& m) {
  py::list faults;
  for (const char* text : kStoreFaultTexts) faults.append(text);
  m.attr("STORE_FAULTS") = faults;
  m.attr("STORE_COST_COLUMNS") = store::kStoreCostColumns;
  m.attr("STORE_BLOCK_TOKENS") = store::kBlockTokens;
  m.attr("STORE_MIN_BLOCKS_PER_SLOT") = store::kMinBlocksPerSlot;
  m.def("store_words", count_store_words, py::arg("num_slots"), py::arg("num_blocks"), py::arg("line_bits"));
  m.def("store_parts", get_store_parts, py::arg("num_slots"), py::arg("num_blocks"), py::arg("line_bits"));
  m.def("store_init", init_store, py::arg("store"), py::arg("num_slots"), py::arg("num_blocks"), py::arg("line_bits"),
        py::arg("visibility"));
  m.def("store_check", check_store, py::arg("store"));
  m.def("store_statistics", get_store_statistics, py::arg("store"));
  m.def("store_lock", lock_store, py::arg("store"));
  m.def("store_unlock", unlock_store, py::arg("store"));
  py::dict word_indices;
  word_indices["lock"] = int{store::kHeaderLock};
  word_indices["epoch"] = int{store::kHeaderEpoch};
  word_indices["inserted"] = int{store::kStatInserted};
  word_indices["calls_skipped"] = int{store::kStatSkippedCalls};
  m.attr("STORE_WORDS") = word_indices;
  m.attr("STORE_PIECE_WORDS") = kStorePieceWords;
  m.def("store_pieces", count_pieces, py::arg("store"));
  m.def("store_pack", pack_store_piece, py::arg("store"), py::arg("piece"), py::arg("to"));
  m.def("store_unpack", unpack_store_piece, py::arg("store"), py::arg("piece"), py::arg("packed"));
  m.def("store_clear", clear_store, py::arg("store"), py::arg("scope"));
  m.def("store_mark_update", mark_update, py::arg("store"));
  m.def("store_drop", drop_store_text, py::arg("store"), py::arg("mark"));
}

}  // namespace ngram_npu::numpy
