// Drafting on the host in the order of a device's stream, for HostDrafting (python/ngram_npu/host_drafting.py).
#include <limits>
#include <utility>
#include <vector>

#include "api/drafting.h"
#include "api/numpy/numpy_call.h"
#include "api/store.h"
#include "cpu/host_drafting.h"

namespace ngram_npu::numpy {
namespace {

constexpr const char* kName = "StreamDrafter";
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Drafter {
 public:
  Drafter(int64_t num_rows, int64_t capacity, int64_t max_sampled, int64_t lag, const py::object& sampled,
          const py::object& drafts, int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap,
          int64_t max_len, bool fill, const py::object& match_costs, bool ladder, const py::object& costs,
          int64_t cost_limit, const py::object& index, const py::object& store, const py::object& store_costs,
          const py::object& token_logits)
      : num_rows_(num_rows),
        k_(k),
        arrays_(py::make_tuple(sampled, drafts, match_costs, costs, index, store, store_costs, token_logits)) {
    NumpyCall call(kName);
    call.check_scalar("num_rows", num_rows, 1, INT32_MAX);
    call.check_scalar("capacity", capacity, 1, INT32_MAX);
    call.check_scalar("max_sampled", max_sampled, 1, kMaxSampledWidth);
    call.check_scalar("lag", lag, 0, 64);
    StreamOptions options{};
    options.num_rows = num_rows;
    options.capacity = capacity;
    options.max_sampled = max_sampled;
    options.lag = lag;
    const api::TensorView tokens = call.view("sampled", py::handle(sampled));
    const TokenRows<const int32_t> rows = call.check_token_rows<const int32_t>(tokens);
    call.check_shape(tokens, num_rows, 1 + max_sampled);
    if (rows.stride != rows.capacity)
      call.fail("sampled", "rows without a gap", std::to_string(rows.stride) + " apart");
    options.sampled = rows.data;
    const api::TensorView results = call.view("drafts", py::handle(drafts));
    call.check_vector(results, {api::DType::kUInt8}, StreamDraftLayout(num_rows, k).total_bytes,
                      api::Arguments::kWrite);
    if (const auto remainder = reinterpret_cast<uintptr_t>(results.data) % alignof(int64_t); remainder != 0)
      call.fail("drafts", "8-byte alignment", "address % 8 == " + std::to_string(remainder));
    options.drafts = static_cast<uint8_t*>(results.data);
    NgramIndexProposeParams& lookup = options.draft.lookup;
    lookup.propose.lookup = call.check_lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
    call.check_scan_costs(&lookup.propose.lookup, call.view("match_costs", match_costs), cost_limit);
    if (!index.is_none()) {
      call.check_index_ngram_range(min_n, max_n, match_policy, ladder);
      lookup.index = api::check_index(call, index, py::none(), num_rows);
    }
    lookup.catch_up_tokens = 0;  // a job inserts text after it has drafted
    lookup.ladder =
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
    // Pending callbacks may still use the drafter and its arrays: they remain allocated until the process ends.
    if (!ngram_npu_cpu_stream_free(drafter_)) arrays_.release();
  }
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  void begin(int64_t row, const py::object& tokens, int64_t scope, const py::object& stop_tokens, int64_t max_length,
             int64_t prompt_length, int64_t min_output, int64_t min_pattern, int64_t max_pattern, int64_t min_count) {
    NumpyCall call("StreamDrafter.begin");
    call.check_scalar("row", row, 0, num_rows_ - 1);
    call.check_scalar("prompt_length", prompt_length, 0, kNoLimit);
    const api::TensorView text = call.view("tokens", py::handle(tokens));
    const int32_t* ids = call.check_int32s(text, -1);
    const api::TensorView stops = call.view("stop_tokens", py::handle(stop_tokens));
    const int32_t* stop_ids = call.check_int32s(stops, -1);
    const StreamRequest request{
        row,
        scope,
        ids,
        text.sizes[0],
        {stop_ids, stops.sizes[0], max_length, prompt_length, min_output, min_pattern, max_pattern, min_count}};
    check(ngram_npu_cpu_stream_begin(drafter_, &request));
  }

  void end(int64_t row) {
    api::Arguments("StreamDrafter.end").check_scalar("row", row, 0, num_rows_ - 1);
    check(ngram_npu_cpu_stream_end(drafter_, row));
  }

  // Creates a job and returns its address.
  uintptr_t step(const py::object& rows, bool drafts) {
    NumpyCall call("StreamDrafter.step");
    const api::TensorView view = call.view("rows", py::handle(rows));
    const int32_t* indices = call.check_int32s(view, -1);
    call.check_scalar("rows size", view.sizes[0], 0, num_rows_);
    StreamJob* job = ngram_npu_cpu_stream_step(drafter_, indices, view.sizes[0], drafts);
    if (job == nullptr) throw std::bad_alloc();
    return reinterpret_cast<uintptr_t>(job);
  }

  void cancel_job() { check(ngram_npu_cpu_stream_take_back(drafter_)); }

  int64_t pending() const { return ngram_npu_cpu_stream_pending(drafter_); }

  // Returns the byte offsets of the counts, lengths and costs of a batch's drafts, and the total size.
  py::tuple results(int64_t batch) const {
    const StreamDraftLayout layout(batch, k_);
    return py::make_tuple(layout.counts_offset, layout.lengths_offset, layout.costs_offset, layout.total_bytes);
  }

 private:
  static void check(int32_t status) {
    if (status != kOk) throw std::bad_alloc();
  }

  int64_t num_rows_, k_;
  py::object arrays_;
  StreamDrafter* drafter_ = nullptr;
};

void run(uintptr_t job) {
  const py::gil_scoped_release gil_released;
  ngram_npu_cpu_stream_run(reinterpret_cast<void*>(job));
}

}  // namespace

void define_stream_drafter(py::module_& m) {
  using py::arg;
  m.attr("STREAM_CALLBACK") = reinterpret_cast<uintptr_t>(&ngram_npu_cpu_stream_run);
  m.def("stream_run", run, arg("job"));
  m.def(
      "stream_results_bytes", [](int64_t batch, int64_t k) { return StreamDraftLayout(batch, k).total_bytes; },
      arg("batch"), arg("k"));
  py::class_<Drafter>(m, kName)
      .def(py::init<int64_t, int64_t, int64_t, int64_t, const py::object&, const py::object&, int64_t, int64_t, int64_t,
                    int64_t, bool, int64_t, bool, const py::object&, bool, const py::object&, int64_t,
                    const py::object&, const py::object&, const py::object&, const py::object&>(),
           py::kw_only(), arg("num_rows"), arg("capacity"), arg("max_sampled"), arg("lag"), arg("sampled"),
           arg("drafts"), arg("min_n"), arg("max_n"), arg("k"), arg("match_policy") = 0, arg("overlap") = false,
           arg("max_len") = kNoLimit, arg("fill") = false, arg("match_costs") = py::none(), arg("ladder") = false,
           arg("costs") = py::none(), arg("cost_limit") = 0, arg("index") = py::none(), arg("store") = py::none(),
           arg("store_costs") = py::none(), arg("token_logits") = py::none())
      .def("begin", &Drafter::begin, arg("row"), arg("tokens"), arg("scope"), arg("stop_tokens"),
           arg("max_length") = kNoLimit, arg("prompt_length") = 0, arg("min_output") = 0, arg("min_pattern") = 0,
           arg("max_pattern") = 0, arg("min_count") = 0)
      .def("end", &Drafter::end, arg("row"))
      .def("step", &Drafter::step, arg("rows"), arg("drafts") = true)
      .def("cancel_job", &Drafter::cancel_job)
      .def("results", &Drafter::results, arg("batch"))
      .def_property_readonly("pending", &Drafter::pending);
}

}  // namespace ngram_npu::numpy
