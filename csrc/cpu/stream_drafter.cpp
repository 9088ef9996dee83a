// StreamDrafter, called by HostDrafting (api/numpy/stream_drafter.cpp) and from a driver's callback.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu/host_drafting.h"
#include "cpu/index_policy.h"
#include "cpu/ngram_index.h"
#include "cpu/ngram_index_arena.h"
#include "cpu/ngram_store_drafter.h"

namespace ngram_npu {

namespace {

constexpr int64_t kNotStopped = INT64_MAX;

struct StopCheck {
  StopConditions conditions{};
  std::vector<int32_t> tokens;

  // Whether the text ends with this token, the last one of the row.
  bool operator()(const int32_t* row, int64_t length) const {
    for (const int32_t token : tokens) {
      if (row[length - 1] == token) return true;
    }
    if (length >= conditions.max_length) return true;
    const int64_t output = length - conditions.prompt_length;
    return output >= conditions.min_output && repeats(row + length, output);
  }

 private:
  // Whether the output before `end` ends with a repeated pattern. vLLM ends a request on the same condition:
  // check_sequence_repetition (v1/core/sched/utils.py).
  bool repeats(const int32_t* end, int64_t output) const {
    if (conditions.max_pattern <= 0 || conditions.min_count < 2) return false;
    for (int64_t size = larger<int64_t>(conditions.min_pattern, 1); size <= conditions.max_pattern; ++size) {
      if (size > output / conditions.min_count) return false;
      const size_t bytes = static_cast<size_t>(size * (conditions.min_count - 1)) * sizeof(int32_t);
      if (std::memcmp(end - size * (conditions.min_count - 1), end - size * conditions.min_count, bytes) == 0)
        return true;
    }
    return false;
  }
};

struct Event {
  int64_t row;
  bool adds_request;
  int64_t scope;
  std::vector<int32_t> tokens;
  StopCheck stop;
};

struct Row {
  bool has_request = false;  // otherwise the row is padding: it samples nothing
  int64_t length = 0;
  int64_t stored_length = 0;          // length up to which the text was inserted into the store
  int64_t stop_length = kNotStopped;  // length at which the request stopped
  int64_t scope = 0;
  uint64_t generation = 0;  // number of requests that this row has had
  StopCheck stop;
};

// The length of a row after a step.
struct RowLength {
  int64_t row;
  uint64_t generation;
  int64_t length;
};

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

class StreamJob {
 public:
  StreamDrafter* drafter;
  std::vector<Event> events;
  std::vector<int32_t> rows;
  bool drafts;
  std::atomic<bool> done{false};
};

class StreamDrafter {
 public:
  explicit StreamDrafter(const StreamOptions& options)
      : o_(options),
        rows_(static_cast<size_t>(o_.num_rows)),
        lengths_(rows_.size()),
        stored_lengths_(rows_.size()),
        num_sampled_(rows_.size()),
        num_to_store_(rows_.size()),
        scopes_(rows_.size()),
        rows_to_store_(rows_.size()),
        num_indexed_(rows_.size()),
        recent_lengths_(static_cast<size_t>(o_.lag + 1)) {
    const size_t tokens = rows_.size() * static_cast<size_t>(o_.capacity);
    // calloc does not touch the memory, which saves memory because most rows use only their beginning.
    tokens_.reset(static_cast<int32_t*>(std::calloc(tokens + 1, sizeof(int32_t))));
    if (tokens_ == nullptr) throw std::bad_alloc();
    for (auto& step : recent_lengths_) step.reserve(rows_.size());
    rows_behind_.reserve(rows_.size());
  }

  // Called on the host, before the jobs run.

  void add_request(const StreamRequest& r) {
    Event event{r.row, true, r.scope, {r.tokens, r.tokens + smaller(r.num_tokens, o_.capacity)}, {r.stop, {}}};
    event.stop.tokens.assign(r.stop.tokens, r.stop.tokens + r.stop.num_tokens);
    events_.push_back(std::move(event));
  }

  void remove_request(int64_t row) { events_.push_back({row, false, 0, {}, {}}); }

  StreamJob* create_job(const int32_t* rows, int64_t batch, bool drafts) {
    while (!jobs_.empty() && jobs_.front()->done.load(std::memory_order_acquire)) jobs_.pop_front();
    auto job = std::make_unique<StreamJob>();
    job->drafter = this;
    job->rows.assign(rows, rows + batch);
    job->drafts = drafts;
    jobs_.push_back(std::move(job));
    jobs_.back()->events.swap(events_);
    return jobs_.back().get();
  }

  // Cancels the last job: its events move to the next job.
  void cancel_job() {
    std::vector<Event>& events = jobs_.back()->events;
    std::move(events_.begin(), events_.end(), std::back_inserter(events));
    events_.swap(events);
    jobs_.pop_back();
  }

  int64_t pending() const {
    int64_t count = 0;
    for (const auto& job : jobs_) count += job->done.load(std::memory_order_acquire) ? 0 : 1;
    return count;
  }

  // Called in stream order.

  // Waits for a store that is being saved, at most for the copy of one piece. No other call may use the store while
  // jobs are pending; if one does, the job runs without the store.
  void run(StreamJob* job) noexcept {
    cpu::Store store;
    const StoreAccess& access = o_.draft.store.store;
    store_ = {};
    if (!cpu::open_store(access.words, access.num_words, &store)) return run_job(job);
    const cpu::StoreUse use(store);
    use ? void(store_ = access) : cpu::count_busy(store);
    run_job(job);
  }

 private:
  void run_job(StreamJob* job) noexcept {
    for (Event& event : job->events) {
      if (event.row < 0 || event.row >= o_.num_rows) continue;
      end_request(event.row);
      if (event.adds_request) begin_request(&event);
    }
    const int64_t batch = static_cast<int64_t>(job->rows.size());
    for (int64_t i = 0; i < batch; ++i)
      num_sampled_[static_cast<size_t>(i)] = append_sampled(i, job->rows[static_cast<size_t>(i)]);
    if (job->drafts) {
      if (batch > 0) draft(job->rows.data(), batch);
    } else {
      index_later(job->rows.data(), batch);
    }
    insert_text(job->rows.data(), batch);
  }

  bool has_request(int64_t r) const { return r >= 0 && r < o_.num_rows && rows_[static_cast<size_t>(r)].has_request; }
  Row& row(int64_t r) { return rows_[static_cast<size_t>(r)]; }
  int32_t* tokens(int64_t r) { return tokens_.get() + r * o_.capacity; }
  TokenRows<const int32_t> all_tokens() const { return {tokens_.get(), o_.num_rows, o_.capacity, o_.capacity}; }
  IndexAccess& index() { return o_.draft.lookup.index; }

  // Ends a row's request. Its text is stored up to its stop; without a stop, text within the lag is dropped.
  void end_request(int64_t r) {
    Row& ended = row(r);
    if (!ended.has_request) return;
    cpu::Store store;
    if (cpu::open_store(store_.words, store_.num_words, &store)) {
      if (ended.stop_length != kNotStopped && ended.stop_length > ended.stored_length) {
        rows_to_store_[0] = static_cast<int32_t>(r);
        num_to_store_[0] = advance_stored_length(&ended, ended.stop_length);
        stored_lengths_[static_cast<size_t>(r)] = static_cast<int32_t>(ended.stored_length);
        store_rows(1);
      }
      if (r < store.num_slots) {
        cpu::TokenInserter inserter(store);
        cpu::close_slot(store, static_cast<uint32_t>(r), &inserter);
      }
    }
    cpu::Arena arena;
    if (cpu::open_arena(index().words, index().num_words, &arena) && r < arena.num_slots)
      cpu::clear_slot(arena, static_cast<uint32_t>(r));
    size_t count = 0;
    for (const int32_t other : rows_behind_) {
      if (other != r) rows_behind_[count++] = other;
    }
    rows_behind_.resize(count);
    ended.has_request = false;
    ended.length = lengths_[static_cast<size_t>(r)] = 0;
    ++ended.generation;
  }

  void begin_request(Event* event) {
    Row& new_row = row(event->row);
    std::copy(event->tokens.begin(), event->tokens.end(), tokens(event->row));
    new_row.has_request = true;
    new_row.length = new_row.stored_length = static_cast<int64_t>(event->tokens.size());
    new_row.stop_length = kNotStopped;
    new_row.scope = event->scope;
    std::swap(new_row.stop, event->stop);
    lengths_[static_cast<size_t>(event->row)] = static_cast<int32_t>(new_row.length);
    if (index().words != nullptr && new_row.length > 0) rows_behind_.push_back(static_cast<int32_t>(event->row));
  }

  // Appends the sampled tokens of request i and returns their number.
  int32_t append_sampled(int64_t i, int64_t r) {
    if (!has_request(r)) return 0;
    const int32_t* sampled = o_.sampled + i * (1 + o_.max_sampled);
    const int64_t count = larger<int64_t>(0, smaller<int64_t>(sampled[0], o_.max_sampled));
    Row& updated = row(r);
    for (int64_t j = 0; j < count && updated.length < o_.capacity; ++j) {
      tokens(r)[updated.length++] = sampled[1 + j];
      if (updated.stop_length == kNotStopped && updated.stop(tokens(r), updated.length))
        updated.stop_length = updated.length;
    }
    lengths_[static_cast<size_t>(r)] = static_cast<int32_t>(updated.length);
    return static_cast<int32_t>(count);
  }

  void draft(const int32_t* rows, int64_t batch) {
    DraftParams params = o_.draft;
    NgramProposeParams& p = params.lookup.propose;
    const StreamDraftLayout layout(batch, p.lookup.k);
    p.token_ids = all_tokens();
    p.num_tokens = lengths_.data();
    p.row_indices = {rows, sizeof(int32_t)};
    p.num_sampled = num_sampled_.data();
    p.batch = batch;
    p.draft_token_ids = {o_.drafts, p.lookup.k, sizeof(int64_t)};
    p.num_draft_tokens = reinterpret_cast<int32_t*>(o_.drafts + layout.counts_offset);
    p.match_len = reinterpret_cast<int32_t*>(o_.drafts + layout.lengths_offset);
    const bool costs = params.lookup.ladder.costs != nullptr || p.lookup.match_costs != nullptr;
    p.draft_costs = {costs ? o_.drafts + layout.costs_offset : nullptr, p.lookup.k};
    for (int64_t i = 0; i < batch; ++i) {
      scopes_[static_cast<size_t>(i)] = has_request(rows[i]) ? row(rows[i]).scope : 0;
    }
    params.store.store = store_;
    params.store.scopes = {scopes_.data(), sizeof(int64_t)};
    ngram_npu_cpu_draft(&params);
  }

  // Leaves it to catch_up() to index the rows of a job that makes no lookup, which would index them.
  void index_later(const int32_t* rows, int64_t batch) {
    if (index().words == nullptr) return;
    for (int64_t i = 0; i < batch; ++i) {
      const bool is_known = std::find(rows_behind_.begin(), rows_behind_.end(), rows[i]) != rows_behind_.end();
      if (num_sampled_[static_cast<size_t>(i)] > 0 && !is_known) rows_behind_.push_back(rows[i]);
    }
  }

  // Records the lengths of the rows, and stores the text up to their lengths `lag` steps ago. A job without requests,
  // such as a dummy run, is not a step of the engine and does not count.
  void insert_text(const int32_t* rows, int64_t batch) {
    catch_up();
    if (std::none_of(rows, rows + batch, [this](int32_t r) { return has_request(r); })) return;
    auto& newest = recent_lengths_[next_];
    newest.clear();
    for (int64_t i = 0; i < batch; ++i) {
      if (num_sampled_[static_cast<size_t>(i)] == 0) continue;
      const Row& updated = row(rows[i]);
      newest.push_back({rows[i], updated.generation, smaller(updated.length, updated.stop_length)});
    }
    next_ = (next_ + 1) % recent_lengths_.size();
    int64_t count = 0;
    for (const RowLength& oldest : recent_lengths_[next_]) {
      Row& updated = row(oldest.row);
      if (updated.generation != oldest.generation || oldest.length <= updated.stored_length) continue;
      rows_to_store_[static_cast<size_t>(count)] = static_cast<int32_t>(oldest.row);
      num_to_store_[static_cast<size_t>(count++)] = advance_stored_length(&updated, oldest.length);
      stored_lengths_[static_cast<size_t>(oldest.row)] = static_cast<int32_t>(updated.stored_length);
    }
    recent_lengths_[next_].clear();
    if (count > 0) store_rows(count);
  }

  // Sets the stored length and returns the number of tokens that it increases by.
  static int32_t advance_stored_length(Row* row, int64_t length) {
    return static_cast<int32_t>(length - std::exchange(row->stored_length, length));
  }

  // Inserts the new text of the first `count` rows_to_store_ into the store.
  void store_rows(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      scopes_[static_cast<size_t>(i)] = row(rows_to_store_[static_cast<size_t>(i)]).scope;
    cpu::insert_rows({store_,
                      all_tokens(),
                      stored_lengths_.data(),
                      num_to_store_.data(),
                      {rows_to_store_.data(), sizeof(int32_t)},
                      {},
                      {scopes_.data(), sizeof(int64_t)},
                      count});
  }

  // Indexes text of rows that are not completely indexed, in the order in which the requests were added.
  void catch_up() {
    if (rows_behind_.empty()) return;
    const LookupOptions& lookup = o_.draft.lookup.propose.lookup;
    const LadderOptions& ladder = o_.draft.lookup.ladder;
    const auto batch = static_cast<int64_t>(rows_behind_.size());
    InsertParams params{};
    params.index = {all_tokens(),
                    lengths_.data(),
                    {rows_behind_.data(), sizeof(int32_t)},
                    batch,
                    lookup.min_n,
                    lookup.max_n,
                    lookup.match_policy,
                    ladder.enabled,
                    ladder.costs != nullptr,
                    {index().words, index().num_words, {}},
                    nullptr};
    params.catch_up_tokens = cpu::kMaxStreamCatchUpTokens;
    ngram_npu_cpu_insert_tokens(&params);
    ngram_npu_cpu_ngram_index_lengths(index().words, index().num_words, rows_behind_.data(), batch,
                                      num_indexed_.data());
    size_t count = 0;
    for (size_t i = 0; i < rows_behind_.size(); ++i) {
      if (num_indexed_[i] < row(rows_behind_[i]).length) rows_behind_[count++] = rows_behind_[i];
    }
    rows_behind_.resize(count);
  }

  StreamOptions o_;
  std::unique_ptr<int32_t[], FreeMemory> tokens_;
  std::vector<Row> rows_;
  std::vector<int32_t> lengths_, stored_lengths_;    // per row
  std::vector<int32_t> num_sampled_, num_to_store_;  // per request of a batch
  std::vector<int64_t> scopes_;                      // per request of a batch
  std::vector<int32_t> rows_to_store_;
  std::vector<int32_t> rows_behind_;                    // not completely indexed
  std::vector<int64_t> num_indexed_;                    // per row of rows_behind_
  std::vector<std::vector<RowLength>> recent_lengths_;  // ring buffer of the last lag + 1 steps
  size_t next_ = 0;
  StoreAccess store_{};                          // without words while the running job must not use the store
  std::vector<Event> events_;                    // for the next job
  std::deque<std::unique_ptr<StreamJob>> jobs_;  // freed by calls on the host
};

}  // namespace ngram_npu

using namespace ngram_npu;

namespace {

template <class Body>
int32_t run_without_exceptions(Body&& body) {
  try {
    body();
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace

StreamDrafter* ngram_npu_cpu_stream_make(const StreamOptions* options) {
  StreamDrafter* drafter = nullptr;
  run_without_exceptions([&] { drafter = new StreamDrafter(*options); });
  return drafter;
}

bool ngram_npu_cpu_stream_free(StreamDrafter* drafter) {
  if (drafter->pending() > 0) return false;
  delete drafter;
  return true;
}

int32_t ngram_npu_cpu_stream_begin(StreamDrafter* drafter, const StreamRequest* request) {
  return run_without_exceptions([&] { drafter->add_request(*request); });
}

int32_t ngram_npu_cpu_stream_end(StreamDrafter* drafter, int64_t row) {
  return run_without_exceptions([&] { drafter->remove_request(row); });
}

StreamJob* ngram_npu_cpu_stream_step(StreamDrafter* drafter, const int32_t* rows, int64_t batch, bool drafts) {
  StreamJob* job = nullptr;
  run_without_exceptions([&] { job = drafter->create_job(rows, batch, drafts); });
  return job;
}

int32_t ngram_npu_cpu_stream_take_back(StreamDrafter* drafter) {
  return run_without_exceptions([&] { drafter->cancel_job(); });
}

void ngram_npu_cpu_stream_run(void* data) {
  auto* const job = static_cast<StreamJob*>(data);
  job->drafter->run(job);
  job->done.store(true, std::memory_order_release);
}

int64_t ngram_npu_cpu_stream_pending(const StreamDrafter* drafter) { return drafter->pending(); }
