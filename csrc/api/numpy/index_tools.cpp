// Making, sizing, checking and reading an index, for NgramIndex (python/ngram_npu/index.py).
#include <utility>
#include <vector>

#include "api/drafting.h"
#include "api/numpy/module.h"
#include "api/numpy/numpy_call.h"
#include "core/ngram_index_layout.h"
#include "cpu/ngram_index.h"

namespace ngram_npu::numpy {
namespace {

api::TensorView index_view(const char* op, py::handle index, api::Arguments::Access access) {
  NumpyCall call(op);
  const api::TensorView view = call("index", index);
  call.vector(view, {api::DType::kInt32}, -1, access);
  return view;
}

void index_init(py::handle index, int64_t num_slots) {
  constexpr const char* op = "index_init";
  const api::TensorView view = index_view(op, index, api::Arguments::kWrite);
  if (ngram_npu_cpu_ngram_index_init(static_cast<int32_t*>(view.data), view.sizes[0], num_slots) != kOk) {
    api::Arguments(op).fail("index", "room for " + std::to_string(num_slots) + " slots and a page",
                            std::to_string(view.sizes[0]) + " words");
  }
}

std::pair<int32_t, int64_t> index_check(py::handle index) {
  const api::TensorView view = index_view("index_check", index, api::Arguments::kRead);
  int64_t where = 0;
  const int32_t fault = ngram_npu_cpu_ngram_index_check(static_cast<const int32_t*>(view.data), view.sizes[0], &where);
  return {fault, where};
}

int32_t index_check_row(py::handle index, int64_t slot, py::handle tokens) {
  constexpr const char* op = "index_check_row";
  const api::TensorView view = index_view(op, index, api::Arguments::kRead);
  NumpyCall call(op);
  const api::TensorView row = call("tokens", tokens);
  const int32_t* data = call.int32s(row, -1);
  return ngram_npu_cpu_ngram_index_check_row(static_cast<const int32_t*>(view.data), view.sizes[0], slot, data,
                                             row.sizes[0]);
}

py::dict index_statistics(py::handle index) {
  constexpr std::pair<const char*, int> kWords[] = {
      {"num_slots", index::kHeaderSlots},
      {"num_pages", index::kHeaderPages},
      {"pages_in_use", index::kHeaderPagesInUse},
      {"pages_peak", index::kHeaderPagesPeak},
      {"rows_indexed", index::kStatIndexed},
      {"rows_scanned_full", index::kStatScanFull},
      {"rows_scanned_catching_up", index::kStatScanCatchUp},
      {"rows_scanned_other", index::kStatScanOther},
      {"rebuilds_shorter", index::kStatRebuildLength},
      {"rebuilds_rewritten", index::kStatRebuildTokens},
      {"rebuilds_options", index::kStatRebuildOptions},
      {"page_splits", index::kStatSplits},
      {"slots_given_up", index::kStatGivenUp},
  };
  const api::TensorView view = index_view("index_statistics", index, api::Arguments::kRead);
  const auto* words = static_cast<const uint32_t*>(view.data);
  py::dict found;
  // 0 for words beyond the tensor.
  for (const auto& [name, word] : kWords) found[name] = word < view.sizes[0] ? words[word] : 0;
  return found;
}

// Indexing a token takes as long as scanning this many tokens, on machines that scan fast.
constexpr int64_t kScannedPerIndexed = 768;
// Looking up a row in the index takes as long as scanning this many tokens.
constexpr int64_t kScannedPerLookup = 2048;
// The lookup itself indexes up to this many missing tokens of a row that drafts.
constexpr int64_t kLeftToLookup = 64;

// Indexes, before a lookup, some of the tokens that the rows' slots lack. The time for it is 1/32 of a scan of the
// rows, so that a step takes little longer than a scan, plus the time that rows without a scan save. `steps` multiplies
// it.
py::tuple index_catch_up(py::handle token_ids, py::handle num_tokens, py::handle index, py::handle slot_indices,
                         py::handle num_sampled, int64_t least_tokens, int64_t prompt_tokens, int64_t min_n,
                         int64_t max_n, int64_t match_policy, bool ladder, bool outcomes, int64_t steps) {
  NumpyCall call("index_catch_up");
  const api::TensorView slots_view = call("slot_indices", slot_indices);
  const int32_t* slots = call.int32s(slots_view, -1);
  const int64_t batch = slots_view.sizes[0];
  NgramIndexAppendParams p{};
  p.token_ids = call.rows<const int32_t>(call("token_ids", token_ids));
  if (p.token_ids.rows < batch)
    call.fail("token_ids", std::to_string(batch) + " rows", std::to_string(p.token_ids.rows));
  const int32_t* ends = call.int32s(call("num_tokens", num_tokens), batch);
  const int32_t* counts = call.int32s(call("num_sampled", num_sampled), batch);
  const api::TensorView words = call("index", index);
  p.index = {call.written_int32s(words, -1), words.sizes[0], {}};
  call.scalar("least_tokens", least_tokens, 0, INT32_MAX);
  call.scalar("prompt_tokens", prompt_tokens, 0, INT32_MAX);
  call.scalar("steps", steps, 1, INT32_MAX);
  call.ngram_range(min_n, max_n, match_policy);
  call.index_span(min_n, max_n, match_policy, ladder);
  call.disjoint();

  std::vector<int64_t> done(static_cast<size_t>(batch));
  ngram_npu_cpu_ngram_index_lengths(p.index.words, p.index.num_words, slots, batch, done.data());
  const auto missing = [&](int64_t i) {
    return int64_t{ends[i]} - larger(counts[i], 0) - done[static_cast<size_t>(i)];
  };
  int64_t scanned = 0, saved = 0;
  bool drafting = false;
  for (int64_t i = 0; i < batch; ++i) {
    if (counts[i] < 1) continue;
    drafting = true;
    scanned += ends[i];
    if (missing(i) <= kLeftToLookup) saved += larger(ends[i] - kScannedPerLookup, int64_t{0});
  }
  int64_t budget = drafting ? larger(least_tokens, (scanned / 32 + saved) / kScannedPerIndexed) * steps : prompt_tokens;

  py::array_t<int32_t> lookup_slots(batch);
  std::vector<int32_t> upto(static_cast<size_t>(batch)), appended_slots;
  std::vector<int64_t> appended;
  int64_t behind = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t left = missing(i), bearable = counts[i] < 1 ? 0 : kLeftToLookup;
    const int64_t taken = left > bearable ? smaller(left, budget) : 0;
    budget -= taken;
    if (taken > 0) {
      upto[static_cast<size_t>(i)] = static_cast<int32_t>(done[static_cast<size_t>(i)] + taken);
      appended.push_back(i);
      appended_slots.push_back(slots[i]);
    }
    const bool late = left - taken > bearable;
    lookup_slots.mutable_data()[i] = late ? -1 : slots[i];
    behind += late ? 1 : 0;
  }
  if (!appended.empty()) {
    p.num_tokens = upto.data();
    p.row_indices = {appended.data(), sizeof(int64_t)};
    p.batch = static_cast<int64_t>(appended.size());
    p.min_n = min_n;
    p.max_n = max_n;
    p.match_policy = static_cast<int32_t>(match_policy);
    p.ladder = ladder;
    p.outcomes = outcomes;
    p.index.slot_indices = {appended_slots.data(), sizeof(int32_t)};
    const Executor executor = NumpyCall::executor();
    p.executor = &executor;
    NumpyCall::run<api::ngram_index_append__op>(p);
  }
  return py::make_tuple(std::move(lookup_slots), behind);
}

}  // namespace

void define_index_tools(py::module_& m) {
  py::list faults;
  for (const char* text : kIndexFaultTexts) faults.append(text);
  m.attr("INDEX_FAULTS") = faults;
  m.attr("INDEX_PAGE_WORDS") = index::kPageWords;
  m.attr("INDEX_MAX_SLOTS") = index::kMaxSlots;
  m.attr("INDEX_HEADER_PAGES") = static_cast<int>(index::kHeaderPages);
  m.attr("INDEX_HEADER_UNUSED_PAGE") = static_cast<int>(index::kHeaderUnusedPage);
  m.attr("INDEX_HEADER_PAGES_IN_USE") = static_cast<int>(index::kHeaderPagesInUse);
  m.def("index_words", ngram_npu_cpu_ngram_index_words, py::arg("num_slots"), py::arg("num_pages"));
  m.def("index_pages", ngram_npu_cpu_ngram_index_pages, py::arg("tokens"), py::arg("num_slots"), py::arg("min_n"),
        py::arg("max_n"), py::arg("any_data"), py::arg("ladder") = false, py::arg("outcomes") = false);
  m.def("index_init", index_init, py::arg("index"), py::arg("num_slots"));
  m.def("index_check", index_check, py::arg("index"));
  m.def("index_check_row", index_check_row, py::arg("index"), py::arg("slot"), py::arg("tokens"));
  m.def("index_statistics", index_statistics, py::arg("index"));
  m.def("index_catch_up", index_catch_up, py::arg("token_ids"), py::arg("num_tokens"), py::arg("index"),
        py::arg("slot_indices"), py::arg("num_sampled"), py::arg("least_tokens"), py::arg("prompt_tokens"),
        py::arg("min_n"), py::arg("max_n"), py::arg("match_policy"), py::arg("ladder"), py::arg("outcomes"),
        py::arg("steps"));
}

}  // namespace ngram_npu::numpy
