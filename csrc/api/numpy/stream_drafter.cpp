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

StreamDrafts layout(int64_t batch, int64_t k) { return {batch, k}; }

class Drafter {
 public:
  Drafter(int64_t num_rows, int64_t capacity, int64_t max_sampled, int64_t lag, const py::object& sampled,
          const py::object& drafts, int64_t min_n, int64_t max_n, int64_t k, int64_t match_policy, bool overlap,
          int64_t max_len, bool fill, const py::object& match_costs, bool ladder, const py::object& costs,
          int64_t cost_limit, const py::object& index, const py::object& store, const py::object& store_costs,
          const py::object& token_logits)
      : num_rows_(num_rows),
        k_(k),
        kept_(py::make_tuple(sampled, drafts, match_costs, costs, index, store, store_costs, token_logits)) {
    NumpyCall call(kName);
    call.scalar("num_rows", num_rows, 1, INT32_MAX);
    call.scalar("capacity", capacity, 1, INT32_MAX);
    call.scalar("max_sampled", max_sampled, 1, kMaxSampledWidth);
    call.scalar("lag", lag, 0, 64);
    StreamOptions options{};
    options.num_rows = num_rows;
    options.capacity = capacity;
    options.max_sampled = max_sampled;
    options.lag = lag;
    const api::TensorView tokens = call("sampled", py::handle(sampled));
    const TokenRows<const int32_t> rows = call.rows<const int32_t>(tokens);
    call.shape(tokens, num_rows, 1 + max_sampled);
    if (rows.stride != rows.capacity)
      call.fail("sampled", "rows without a gap", std::to_string(rows.stride) + " apart");
    options.sampled = rows.data;
    const api::TensorView results = call("drafts", py::handle(drafts));
    call.vector(results, {api::DType::kUInt8}, layout(num_rows, k).end, api::Arguments::kWrite);
    if (const auto rest = reinterpret_cast<uintptr_t>(results.data) % alignof(int64_t); rest != 0)
      call.fail("drafts", "8-byte alignment", "address % 8 == " + std::to_string(rest));
    options.drafts = static_cast<uint8_t*>(results.data);
    NgramIndexProposeParams& lookup = options.draft.lookup;
    lookup.propose.lookup = call.lookup(min_n, max_n, k, match_policy, overlap, max_len, fill);
    call.scan_costs(&lookup.propose.lookup, call("match_costs", match_costs), cost_limit);
    if (!index.is_none()) {
      call.index_span(min_n, max_n, match_policy, ladder);
      lookup.index = api::check_index(call, index, py::none(), num_rows);
    }
    lookup.catch_up_tokens = 0;  // a job inserts text after it has drafted
    lookup.ladder = call.ladder(ladder, call("costs", costs), cost_limit, call("token_logits", token_logits));
    if (!store.is_none()) {
      options.draft.store.store = api::check_store(call, store);
      const CostTable table = call.cost_table(call("store_costs", py::handle(store_costs)), store::kStoreCostColumns,
                                              call("token_logits", token_logits));
      options.draft.store.costs = table.cells;
      options.draft.store.cost_limit = cost_limit;
      options.draft.store.token_logits = table.token_logits;
    }
    call.disjoint();
    drafter_ = ngram_npu_cpu_stream_make(&options);
    if (drafter_ == nullptr) throw std::bad_alloc();
  }
  ~Drafter() {
    // The jobs' callbacks may still come, and use all of it: it stays until the process ends.
    if (!ngram_npu_cpu_stream_free(drafter_)) kept_.release();
  }
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;

  void begin(int64_t row, const py::object& tokens, int64_t scope, const py::object& stop_tokens, int64_t max_length,
             int64_t prompt_length, int64_t min_output, int64_t min_pattern, int64_t max_pattern, int64_t min_count) {
    NumpyCall call("StreamDrafter.begin");
    call.scalar("row", row, 0, num_rows_ - 1);
    call.scalar("prompt_length", prompt_length, 0, kNoLimit);
    const api::TensorView text = call("tokens", py::handle(tokens));
    const int32_t* ids = call.int32s(text, -1);
    const api::TensorView stops = call("stop_tokens", py::handle(stop_tokens));
    const int32_t* stop_ids = call.int32s(stops, -1);
    const StreamBegin begin{
        row,
        scope,
        ids,
        text.sizes[0],
        {stop_ids, stops.sizes[0], max_length, prompt_length, min_output, min_pattern, max_pattern, min_count}};
    check(ngram_npu_cpu_stream_begin(drafter_, &begin));
  }

  void end(int64_t row) {
    api::Arguments("StreamDrafter.end").scalar("row", row, 0, num_rows_ - 1);
    check(ngram_npu_cpu_stream_end(drafter_, row));
  }

  // The address of a new job.
  uintptr_t step(const py::object& rows) {
    NumpyCall call("StreamDrafter.step");
    const api::TensorView view = call("rows", py::handle(rows));
    const int32_t* indices = call.int32s(view, -1);
    call.scalar("rows size", view.sizes[0], 0, num_rows_);
    StreamJob* job = ngram_npu_cpu_stream_step(drafter_, indices, view.sizes[0]);
    if (job == nullptr) throw std::bad_alloc();
    return reinterpret_cast<uintptr_t>(job);
  }

  void take_back() { check(ngram_npu_cpu_stream_take_back(drafter_)); }

  int64_t pending() const { return ngram_npu_cpu_stream_pending(drafter_); }

  // Begin of the numbers, the lengths and the costs of a batch's drafts, and the end, in bytes.
  py::tuple results(int64_t batch) const {
    const StreamDrafts at = layout(batch, k_);
    return py::make_tuple(at.counts, at.lengths, at.costs, at.end);
  }

 private:
  static void check(int32_t status) {
    if (status != kOk) throw std::bad_alloc();
  }

  int64_t num_rows_, k_;
  py::object kept_;
  StreamDrafter* drafter_ = nullptr;
};

void run(uintptr_t job) {
  const py::gil_scoped_release released;
  ngram_npu_cpu_stream_run(reinterpret_cast<void*>(job));
}

}  // namespace

void define_stream_drafter(py::module_& m) {
  using py::arg;
  m.attr("STREAM_CALLBACK") = reinterpret_cast<uintptr_t>(&ngram_npu_cpu_stream_run);
  m.def("stream_run", run, arg("job"));
  m.def("stream_results_bytes", [](int64_t batch, int64_t k) { return layout(batch, k).end; }, arg("batch"), arg("k"));
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
      .def("step", &Drafter::step, arg("rows"))
      .def("take_back", &Drafter::take_back)
      .def("results", &Drafter::results, arg("batch"))
      .def_property_readonly("pending", &Drafter::pending);
}

}  // namespace ngram_npu::numpy
