// The drafter of a stream, called by HostDrafting (api/numpy/stream_drafter.cpp) and from a driver's callback.
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

constexpr int64_t kNotCut = INT64_MAX;

struct Stop {
  StreamStop rule{};
  std::vector<int32_t> tokens;

  // Whether the text ends with this token, the last one of the row.
  bool operator()(const int32_t* row, int64_t length) const {
    for (const int32_t token : tokens) {
      if (row[length - 1] == token) return true;
    }
    if (length >= rule.max_length) return true;
    const int64_t output = length - rule.prompt_length;
    return output >= rule.min_output && repeats(row + length, output);
  }

 private:
  // Whether the output before `end` ends with a repeated pattern. The same rule as check_sequence_repetition of vLLM,
  // which ends a request by it (v1/core/sched/utils.py).
  bool repeats(const int32_t* end, int64_t output) const {
    if (rule.max_pattern <= 0 || rule.min_count < 2) return false;
    for (int64_t size = larger<int64_t>(rule.min_pattern, 1); size <= rule.max_pattern; ++size) {
      if (size > output / rule.min_count) return false;
      const size_t bytes = static_cast<size_t>(size * (rule.min_count - 1)) * sizeof(int32_t);
      if (std::memcmp(end - size * (rule.min_count - 1), end - size * rule.min_count, bytes) == 0) return true;
    }
    return false;
  }
};

struct Event {
  int64_t row;
  bool begins;
  int64_t scope;
  std::vector<int32_t> tokens;
  Stop stop;
};

struct Row {
  bool has_request = false;  // otherwise the row is padding: it samples nothing
  int64_t length = 0;
  int64_t settled = 0;    // length up to which the store has received the text
  int64_t cut = kNotCut;  // length at which the request stopped
  int64_t scope = 0;
  uint64_t generation = 0;  // of the requests that had this row
  Stop stop;
};

// The length of a row after a step.
struct Growth {
  int64_t row;
  uint64_t generation;
  int64_t length;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

class StreamJob {
 public:
  StreamDrafter* drafter;
  std::vector<Event> events;
  std::vector<int32_t> rows;
  std::atomic<bool> done{false};
};

class StreamDrafter {
 public:
  explicit StreamDrafter(const StreamOptions& options)
      : o_(options),
        rows_(static_cast<size_t>(o_.num_rows)),
        lengths_(rows_.size()),
        settled_(rows_.size()),
        num_sampled_(rows_.size()),
        num_settled_(rows_.size()),
        scopes_(rows_.size()),
        settled_rows_(rows_.size()),
        done_(rows_.size()),
        grown_(static_cast<size_t>(o_.lag + 1)) {
    const size_t tokens = rows_.size() * static_cast<size_t>(o_.capacity);
    // Not touched here, because most rows use only their beginning.
    tokens_.reset(static_cast<int32_t*>(std::calloc(tokens + 1, sizeof(int32_t))));
    if (tokens_ == nullptr) throw std::bad_alloc();
    for (auto& step : grown_) step.reserve(rows_.size());
    behind_.reserve(rows_.size());
  }

  // On the host, ahead of the jobs.

  void begin(const StreamBegin& b) {
    Event event{b.row, true, b.scope, {b.tokens, b.tokens + smaller(b.num_tokens, o_.capacity)}, {b.stop, {}}};
    event.stop.tokens.assign(b.stop.tokens, b.stop.tokens + b.stop.num_tokens);
    events_.push_back(std::move(event));
  }

  void end(int64_t row) { events_.push_back({row, false, 0, {}, {}}); }

  StreamJob* step(const int32_t* rows, int64_t batch) {
    while (!jobs_.empty() && jobs_.front()->done.load(std::memory_order_acquire)) jobs_.pop_front();
    auto job = std::make_unique<StreamJob>();
    job->drafter = this;
    job->rows.assign(rows, rows + batch);
    jobs_.push_back(std::move(job));
    jobs_.back()->events.swap(events_);
    return jobs_.back().get();
  }

  // Cancels the last job: its events move to the next job.
  void take_back() {
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

  // In stream order.

  // Waits for a store that is being saved, at most for the copy of one piece. No other call may use the store while
  // jobs are pending; if one does, the job runs without the store.
  void run(StreamJob* job) noexcept {
    cpu::Store open;
    const StoreAccess& access = o_.draft.store.store;
    store_ = {};
    if (!cpu::open_store(access.words, access.num_words, &open)) return work(job);
    const cpu::StoreUse use(open);
    use ? void(store_ = access) : cpu::count_busy(open);
    work(job);
  }

 private:
  void work(StreamJob* job) noexcept {
    for (Event& event : job->events) {
      if (event.row < 0 || event.row >= o_.num_rows) continue;
      leave(event.row);
      if (event.begins) enter(&event);
    }
    const int64_t batch = static_cast<int64_t>(job->rows.size());
    for (int64_t i = 0; i < batch; ++i)
      num_sampled_[static_cast<size_t>(i)] = append(i, job->rows[static_cast<size_t>(i)]);
    if (batch > 0) draft(job->rows.data(), batch);
    insert_text(job->rows.data(), batch);
  }

  bool has_request(int64_t r) const { return r >= 0 && r < o_.num_rows && rows_[static_cast<size_t>(r)].has_request; }
  Row& row(int64_t r) { return rows_[static_cast<size_t>(r)]; }
  int32_t* tokens(int64_t r) { return tokens_.get() + r * o_.capacity; }
  TokenRows<const int32_t> all_tokens() const { return {tokens_.get(), o_.num_rows, o_.capacity, o_.capacity}; }
  IndexAccess& index() { return o_.draft.lookup.index; }

  // Ends a row's request. Its text is stored up to its stop; without a stop, text within the lag is dropped.
  void leave(int64_t r) {
    Row& ended = row(r);
    if (!ended.has_request) return;
    cpu::Store open;
    if (cpu::open_store(store_.words, store_.num_words, &open)) {
      if (ended.cut != kNotCut && ended.cut > ended.settled) {
        settled_rows_[0] = static_cast<int32_t>(r);
        num_settled_[0] = settle(&ended, ended.cut);
        settled_[static_cast<size_t>(r)] = static_cast<int32_t>(ended.settled);
        store_settled(1);
      }
      if (r < open.num_slots) {
        cpu::Entering entering(open);
        cpu::close_slot(open, static_cast<uint32_t>(r), &entering);
      }
    }
    cpu::Arena arena;
    if (cpu::open_arena(index().words, index().num_words, &arena) && r < arena.num_slots)
      cpu::clear_slot(arena, static_cast<uint32_t>(r));
    behind_.erase(std::remove(behind_.begin(), behind_.end(), static_cast<int32_t>(r)), behind_.end());
    ended.has_request = false;
    ended.length = lengths_[static_cast<size_t>(r)] = 0;
    ++ended.generation;
  }

  void enter(Event* event) {
    Row& begun = row(event->row);
    std::copy(event->tokens.begin(), event->tokens.end(), tokens(event->row));
    begun.has_request = true;
    begun.length = begun.settled = static_cast<int64_t>(event->tokens.size());
    begun.cut = kNotCut;
    begun.scope = event->scope;
    std::swap(begun.stop, event->stop);
    lengths_[static_cast<size_t>(event->row)] = static_cast<int32_t>(begun.length);
    if (index().words != nullptr && begun.length > 0) behind_.push_back(static_cast<int32_t>(event->row));
  }

  // Appends the tokens of request i; returns how many it sampled.
  int32_t append(int64_t i, int64_t r) {
    if (!has_request(r)) return 0;
    const int32_t* sampled = o_.sampled + i * (1 + o_.max_sampled);
    const int64_t count = larger<int64_t>(0, smaller<int64_t>(sampled[0], o_.max_sampled));
    Row& grown = row(r);
    for (int64_t j = 0; j < count && grown.length < o_.capacity; ++j) {
      tokens(r)[grown.length++] = sampled[1 + j];
      if (grown.cut == kNotCut && grown.stop(tokens(r), grown.length)) grown.cut = grown.length;
    }
    lengths_[static_cast<size_t>(r)] = static_cast<int32_t>(grown.length);
    return static_cast<int32_t>(count);
  }

  void draft(const int32_t* rows, int64_t batch) {
    DraftParams params = o_.draft;
    NgramProposeParams& p = params.lookup.propose;
    const StreamDrafts at(batch, p.lookup.k);
    p.token_ids = all_tokens();
    p.num_tokens = lengths_.data();
    p.row_indices = {rows, sizeof(int32_t)};
    p.num_sampled = num_sampled_.data();
    p.batch = batch;
    p.draft_token_ids = {o_.drafts, p.lookup.k, sizeof(int64_t)};
    p.num_draft_tokens = reinterpret_cast<int32_t*>(o_.drafts + at.counts);
    p.match_len = reinterpret_cast<int32_t*>(o_.drafts + at.lengths);
    const bool costs = params.lookup.ladder.costs != nullptr || p.lookup.match_costs != nullptr;
    p.draft_costs = {costs ? o_.drafts + at.costs : nullptr, p.lookup.k};
    for (int64_t i = 0; i < batch; ++i) {
      scopes_[static_cast<size_t>(i)] = has_request(rows[i]) ? row(rows[i]).scope : 0;
    }
    params.store.store = store_;
    params.store.scopes = {scopes_.data(), sizeof(int64_t)};
    ngram_npu_cpu_draft(&params);
  }

  // Records the lengths of the rows, and stores the text up to their lengths `lag` steps ago. A job without requests,
  // such as a dummy run, is not a step of the engine: it reveals no end of a request.
  void insert_text(const int32_t* rows, int64_t batch) {
    catch_up();
    if (std::none_of(rows, rows + batch, [this](int32_t r) { return has_request(r); })) return;
    auto& now = grown_[next_];
    now.clear();
    for (int64_t i = 0; i < batch; ++i) {
      if (num_sampled_[static_cast<size_t>(i)] == 0) continue;
      const Row& grown = row(rows[i]);
      now.push_back({rows[i], grown.generation, smaller(grown.length, grown.cut)});
    }
    next_ = (next_ + 1) % grown_.size();
    int64_t count = 0;
    for (const Growth& growth : grown_[next_]) {  // the oldest: this step is over
      Row& grown = row(growth.row);
      if (grown.generation != growth.generation || growth.length <= grown.settled) continue;
      settled_rows_[static_cast<size_t>(count)] = static_cast<int32_t>(growth.row);
      num_settled_[static_cast<size_t>(count++)] = settle(&grown, growth.length);
      settled_[static_cast<size_t>(growth.row)] = static_cast<int32_t>(grown.settled);
    }
    grown_[next_].clear();
    if (count > 0) store_settled(count);
  }

  static int32_t settle(Row* row, int64_t length) {
    return static_cast<int32_t>(length - std::exchange(row->settled, length));
  }

  // Stores the newest num_settled_ of the settled tokens of the first `count` settled_rows_.
  void store_settled(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      scopes_[static_cast<size_t>(i)] = row(settled_rows_[static_cast<size_t>(i)]).scope;
    cpu::insert_rows({store_,
                      all_tokens(),
                      settled_.data(),
                      num_settled_.data(),
                      {settled_rows_.data(), sizeof(int32_t)},
                      {},
                      {scopes_.data(), sizeof(int64_t)},
                      count});
  }

  // Indexes text of rows that are not completely indexed, in the order in which they began.
  void catch_up() {
    if (behind_.empty()) return;
    const LookupOptions& lookup = o_.draft.lookup.propose.lookup;
    const LadderOptions& ladder = o_.draft.lookup.ladder;
    const auto batch = static_cast<int64_t>(behind_.size());
    InsertParams params{};
    params.index = {all_tokens(),
                    lengths_.data(),
                    {behind_.data(), sizeof(int32_t)},
                    batch,
                    lookup.min_n,
                    lookup.max_n,
                    lookup.match_policy,
                    ladder.on,
                    ladder.costs != nullptr,
                    {index().words, index().num_words, {}},
                    nullptr};
    params.catch_up_tokens = cpu::kStreamCatchUpTokens;
    ngram_npu_cpu_insert_tokens(&params);
    ngram_npu_cpu_ngram_index_lengths(index().words, index().num_words, behind_.data(), batch, done_.data());
    size_t num_behind = 0;
    for (size_t i = 0; i < behind_.size(); ++i) {
      if (done_[i] < row(behind_[i]).length) behind_[num_behind++] = behind_[i];
    }
    behind_.resize(num_behind);
  }

  StreamOptions o_;
  std::unique_ptr<int32_t[], Free> tokens_;
  std::vector<Row> rows_;
  std::vector<int32_t> lengths_, settled_;          // of all rows
  std::vector<int32_t> num_sampled_, num_settled_;  // of a batch
  std::vector<int64_t> scopes_;                     // of a batch
  std::vector<int32_t> settled_rows_, behind_;
  std::vector<int64_t> done_;
  std::vector<std::vector<Growth>> grown_;  // a ring: this step's, and those that lag
  size_t next_ = 0;
  StoreAccess store_{};                          // what the running job has of it
  std::vector<Event> events_;                    // for the next job
  std::deque<std::unique_ptr<StreamJob>> jobs_;  // freed on the host
};

}  // namespace ngram_npu

using namespace ngram_npu;

namespace {

template <class Body>
int32_t without_exceptions(Body&& body) {
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
  without_exceptions([&] { drafter = new StreamDrafter(*options); });
  return drafter;
}

bool ngram_npu_cpu_stream_free(StreamDrafter* drafter) {
  if (drafter->pending() > 0) return false;
  delete drafter;
  return true;
}

int32_t ngram_npu_cpu_stream_begin(StreamDrafter* drafter, const StreamBegin* begin) {
  return without_exceptions([&] { drafter->begin(*begin); });
}

int32_t ngram_npu_cpu_stream_end(StreamDrafter* drafter, int64_t row) {
  return without_exceptions([&] { drafter->end(row); });
}

StreamJob* ngram_npu_cpu_stream_step(StreamDrafter* drafter, const int32_t* rows, int64_t batch) {
  StreamJob* job = nullptr;
  without_exceptions([&] { job = drafter->step(rows, batch); });
  return job;
}

int32_t ngram_npu_cpu_stream_take_back(StreamDrafter* drafter) {
  return without_exceptions([&] { drafter->take_back(); });
}

void ngram_npu_cpu_stream_run(void* job) {
  auto* const stream_job = static_cast<StreamJob*>(job);
  stream_job->drafter->run(stream_job);
  stream_job->done.store(true, std::memory_order_release);
}

int64_t ngram_npu_cpu_stream_pending(const StreamDrafter* drafter) { return drafter->pending(); }
