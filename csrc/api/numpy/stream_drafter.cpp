// numpy binding of StreamDrafter, which drafts on the host in the order of a device's stream. Used by HostDrafting
// (python/ngram_npu/host_drafting.py).
#include <limits>
#include <utility>
#include <vector>

#include "api/drafting.h"
#include "api/numpy/numpy_call.h"
#include "api/store.h"
#include "cpu/host_drafting.h"

namespace ngram_npu::numpy {
namespace {

constexpr const char* kDrafterName = "StreamDrafter";
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Checks the arguments of a StreamDrafter and keeps its arrays allocated.
class Drafter {
 public:
  Drafter(int64_t num_rows, int64_t capacity, int64_t max_sampled, int64_t lag, const py::object& sampled,
          const py::object& drafts, int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap,
          int64_t max_len, bool fill, const py::object& match_costs, bool ladder, const py::object& costs,
          int64_t cost_limit, const py::object& index, const py::object& store, const py::object& store_costs,
          const py::object& token_logits, int64_t num_text_rows, int64_t text_capacity)
      : num_rows_(num_rows),
        num_text_rows_(num_text_rows),
        k_(k),
        arrays_(py::make_tuple(sampled, drafts, match_costs, costs, index, store, store_costs, token_logits)) {
    NumpyCall call(kDrafterName);
    call.check_scalar("num_rows", num_rows, 1, INT32_MAX);
    call.check_scalar("capacity", capacity, 1, INT32_MAX);
    call.check_scalar("max_sampled", max_sampled, 1, kMaxSampledWidth);
    call.check_scalar("lag", lag, 0, 64);
    call.check_scalar("num_text_rows", num_text_rows, 0, INT32_MAX - num_rows);
    call.check_scalar("text_capacity", text_capacity, num_text_rows > 0 ? 1 : 0, INT32_MAX);
    StreamOptions options{};
    options.num_rows = num_rows;
    options.capacity = capacity;
    options.max_sampled = max_sampled;
    options.lag = lag;
    options.num_text_rows = num_text_rows;
    options.text_capacity = text_capacity;
    const api::TensorView tokens = call.view("sampled", py::handle(sampled));
    const TokenRows<const int32_t> rows = call.check_token_rows<const int32_t>(tokens);
    call.check_shape(tokens, num_rows, 1 + max_sampled);
    if (rows.stride != rows.capacity)
      call.fail("sampled", "a contiguous matrix", "outer stride " + std::to_string(rows.stride));
    options.sampled = rows.data;
    const api::TensorView results = call.view("drafts", py::handle(drafts));
    call.check_vector(results, {api::DType::kUInt8}, StreamDraftLayout(num_rows, k).total_bytes,
                      api::Arguments::kWrite);
    if (const auto remainder = reinterpret_cast<uintptr_t>(results.data) % alignof(int64_t); remainder != 0)
      call.fail("drafts", "8-byte alignment", "address % 8 == " + std::to_string(remainder));
    options.drafts = static_cast<uint8_t*>(results.data);
    NgramIndexProposeParams& index_propose = options.draft.index_propose;
    index_propose.propose.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
    call.check_scan_costs(&index_propose.propose.lookup, call.view("match_costs", match_costs), cost_limit);
    if (!index.is_none()) {
      call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
      index_propose.index = api::check_index(call, index, py::none(), num_rows);
    }
    index_propose.catch_up_tokens = 0;  // a job indexes missing tokens after it has drafted
    index_propose.ladder =
        call.check_ladder(ladder, call.view("costs", costs), cost_limit, call.view("token_logits", token_logits));
    if (!store.is_none()) {
      options.draft.store.store = api::check_store(call, store);
      const CostTable table = call.check_cost_table(call.view("store_costs", py::handle(store_costs)),
                                                    store::kStoreCostColumns, call.view("token_logits", token_logits));
      options.draft.store.costs = table.cells;
      options.draft.store.cost_limit = cost_limit;
      options.draft.store.token_logits = table.token_logits;
    }
    call.check_no_overlap();
    drafter_ = ngram_npu_cpu_stream_make(&options);
    if (drafter_ == nullptr) throw std::bad_alloc();
  }
  ~Drafter() {
    // Pending callbacks may still use the drafter and its arrays. Both then remain allocated until the process ends.
    if (!ngram_npu_cpu_stream_free(drafter_)) arrays_.release();
  }
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  void add_request(int64_t row, const py::object& tokens, int64_t scope, const py::object& stop_tokens,
                   int64_t max_length, int64_t prompt_length, int64_t min_output, int64_t min_pattern,
                   int64_t max_pattern, int64_t min_count, const py::object& prompt_scope) {
    NumpyCall call("StreamDrafter.add_request");
    call.check_scalar("row", row, 0, num_rows_ - 1);
    call.check_scalar("prompt_length", prompt_length, 0, kNoLimit);
    const api::TensorView text = call.view("tokens", py::handle(tokens));
    const int32_t* ids = call.check_int32s(text, api::kAnySize);
    const api::TensorView stops = call.view("stop_tokens", py::handle(stop_tokens));
    const int32_t* stop_ids = call.check_int32s(stops, api::kAnySize);
    const auto prompt_scope_number = prompt_scope.is_none() ? int64_t{0} : prompt_scope.cast<int64_t>();
    const StreamRequest request{
        row,
        scope,
        ids,
        text.sizes[0],
        {stop_ids, stops.sizes[0], max_length, prompt_length, min_output, min_pattern, max_pattern, min_count},
        prompt_scope.is_none() ? nullptr : &prompt_scope_number};
    throw_if_out_of_memory(ngram_npu_cpu_stream_add_request(drafter_, &request));
  }

  void remove_request(int64_t row) {
    api::Arguments("StreamDrafter.remove_request").check_scalar("row", row, 0, num_rows_ - 1);
    throw_if_out_of_memory(ngram_npu_cpu_stream_remove_request(drafter_, row));
  }

  void append_text(int64_t row, const py::object& tokens, int64_t scope, bool begins_text) {
    NumpyCall call("StreamDrafter.append_text");
    call.check_scalar("row", row, 0, num_text_rows_ - 1);
    const api::TensorView view = call.view("tokens", py::handle(tokens));
    const StreamText text{row, begins_text, scope, call.check_int32s(view, api::kAnySize), view.sizes[0]};
    throw_if_out_of_memory(ngram_npu_cpu_stream_append_text(drafter_, &text));
  }

  // Creates a job and returns its address.
  uintptr_t create_job(const py::object& rows, bool writes_drafts) {
    NumpyCall call("StreamDrafter.create_job");
    const api::TensorView view = call.view("rows", py::handle(rows));
    const int32_t* indices = call.check_int32s(view, api::kAnySize);
    call.check_scalar("rows size", view.sizes[0], 0, num_rows_);
    StreamJob* job = ngram_npu_cpu_stream_create_job(drafter_, indices, view.sizes[0], writes_drafts);
    if (job == nullptr) throw std::bad_alloc();
    return reinterpret_cast<uintptr_t>(job);
  }

  void cancel_job() { throw_if_out_of_memory(ngram_npu_cpu_stream_cancel_job(drafter_)); }

  int64_t count_pending_jobs() const { return ngram_npu_cpu_stream_count_pending_jobs(drafter_); }

  // Returns the byte offsets of the counts, lengths and costs of a batch's drafts, and the total size.
  py::tuple draft_offsets(int64_t batch) const {
    const StreamDraftLayout layout(batch, k_);
    return py::make_tuple(layout.counts_offset, layout.lengths_offset, layout.costs_offset, layout.total_bytes);
  }

 private:
  static void throw_if_out_of_memory(int32_t status) {
    if (status != kOk) throw std::bad_alloc();
  }

  int64_t num_rows_, num_text_rows_, k_;
  py::object arrays_;
  StreamDrafter* drafter_ = nullptr;
};

void run_job(uintptr_t job) {
  const py::gil_scoped_release gil_released;
  ngram_npu_cpu_stream_run_job(reinterpret_cast<void*>(job));
}

}  // namespace

void define_stream_drafter(py::module_& m) {
  using py::arg;
  m.attr("STREAM_CALLBACK") = reinterpret_cast<uintptr_t>(&ngram_npu_cpu_stream_run_job);
  m.def("stream_run_job", run_job, arg("job"));
  m.def(
      "stream_results_bytes", [](int64_t batch, int64_t k) { return StreamDraftLayout(batch, k).total_bytes; },
      arg("batch"), arg("k"));
  py::class_<Drafter>(m, kDrafterName)
      .def(py::init<int64_t, int64_t, int64_t, int64_t, const py::object&, const py::object&, int64_t, int64_t, int64_t,
                    int64_t, bool, int64_t, bool, const py::object&, bool, const py::object&, int64_t,
                    const py::object&, const py::object&, const py::object&, const py::object&, int64_t, int64_t>(),
           py::kw_only(), arg("num_rows"), arg("capacity"), arg("max_sampled"), arg("lag"), arg("sampled"),
           arg("drafts"), arg("min_n"), arg("max_n"), arg("k"), arg("match_policy") = 0, arg("overlap") = false,
           arg("max_len") = kNoLimit, arg("fill") = false, arg("match_costs") = py::none(), arg("ladder") = false,
           arg("costs") = py::none(), arg("cost_limit") = 0, arg("index") = py::none(), arg("store") = py::none(),
           arg("store_costs") = py::none(), arg("token_logits") = py::none(), arg("num_text_rows") = 0,
           arg("text_capacity") = 0)
      .def("add_request", &Drafter::add_request, arg("row"), arg("tokens"), arg("scope"), arg("stop_tokens"),
           arg("max_length") = kNoLimit, arg("prompt_length") = 0, arg("min_output") = 0, arg("min_pattern") = 0,
           arg("max_pattern") = 0, arg("min_count") = 0, arg("prompt_scope") = py::none())
      .def("remove_request", &Drafter::remove_request, arg("row"))
      .def("append_text", &Drafter::append_text, arg("row"), arg("tokens"), arg("scope"), arg("begins_text"))
      .def("create_job", &Drafter::create_job, arg("rows"), arg("writes_drafts") = true)
      .def("cancel_job", &Drafter::cancel_job)
      .def("draft_offsets", &Drafter::draft_offsets, arg("batch"))
      .def("count_pending_jobs", &Drafter::count_pending_jobs);
}

}  // namespace ngram_npu::numpy
