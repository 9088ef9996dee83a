// Implements StreamDrafter (host_drafting.h), which drafts on the host in the order of a device's stream. HostDrafting
// (through api/numpy/stream_drafter.cpp) and the driver's callbacks call its functions.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
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

// The stop conditions of a request. The object owns the stop tokens.
struct StopCheck {
  StopConditions conditions{};
  std::vector<int32_t> tokens;

  // Whether the text ends with the row's last token.
  bool operator()(const int32_t* row, int64_t length) const {
    for (const int32_t token : tokens) {
      if (row[length - 1] == token) return true;
    }
    if (length >= conditions.max_length) return true;
    const int64_t output_length = length - conditions.prompt_length;
    return output_length >= conditions.min_output && has_repetition_before(row + length, output_length);
  }

 private:
  // Whether the output before `end` ends with a repeated pattern. vLLM ends a request on the same condition:
  // check_sequence_repetition (v1/core/sched/utils.py).
  bool has_repetition_before(const int32_t* end, int64_t output_length) const {
    if (conditions.max_pattern <= 0 || conditions.min_count < 2) return false;
    for (int64_t size = larger<int64_t>(conditions.min_pattern, 1); size <= conditions.max_pattern; ++size) {
      if (size > output_length / conditions.min_count) return false;
      const size_t bytes = static_cast<size_t>(size * (conditions.min_count - 1)) * sizeof(int32_t);
      if (std::memcmp(end - size * (conditions.min_count - 1), end - size * conditions.min_count, bytes) == 0)
        return true;
    }
    return false;
  }
};

// A request that a job adds to a row, or the removal of a row's request.
struct RowChange {
  int64_t row;
  bool adds_request;
  int64_t scope;
  std::optional<int64_t> prompt_scope;
  std::vector<int32_t> tokens;
  StopCheck stop;
};

// Tokens that a job appends to a text row.
struct TextChange {
  int64_t row;
  bool begins_text;
  int64_t scope;
  std::vector<int32_t> tokens;
};

struct Row {
  bool has_request = false;  // if false, the row is padding, and its sampled tokens are ignored
  int64_t length = 0;
  int64_t stored_length = 0;          // length up to which the text was inserted into the store
  int64_t stop_length = kNotStopped;  // length at which the request stopped
  int64_t scope = 0;
  std::optional<int64_t> prompt_scope;
  uint64_t generation = 0;  // number of requests that this row had before
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
  std::vector<RowChange> changes;
  std::vector<TextChange> texts;
  std::vector<int32_t> rows;
  bool writes_drafts;
  std::atomic<bool> is_done{false};
};

class StreamDrafter {
 public:
  explicit StreamDrafter(const StreamOptions& options)
      : options_(options),
        rows_(static_cast<size_t>(options_.num_rows)),
        lengths_(rows_.size()),
        stored_lengths_(rows_.size()),
        num_sampled_(rows_.size()),
        num_to_store_(rows_.size()),
        scopes_(rows_.size()),
        prompt_scopes_(rows_.size()),
        has_prompt_scope_(rows_.size()),
        prompt_slots_(rows_.size()),
        rows_to_store_(rows_.size()),
        num_indexed_(rows_.size()),
        text_lengths_(static_cast<size_t>(options_.num_text_rows)),
        text_scopes_(text_lengths_.size()),
        recent_lengths_(static_cast<size_t>(options_.lag + 1)) {
    const size_t num_tokens = rows_.size() * static_cast<size_t>(options_.capacity);
    const size_t num_text_tokens = text_lengths_.size() * static_cast<size_t>(options_.text_capacity);
    // calloc() does not write to the memory, of which most rows use only the first part.
    tokens_.reset(static_cast<int32_t*>(std::calloc(num_tokens + 1, sizeof(int32_t))));
    text_tokens_.reset(static_cast<int32_t*>(std::calloc(num_text_tokens + 1, sizeof(int32_t))));
    if (tokens_ == nullptr || text_tokens_ == nullptr) throw std::bad_alloc();
    for (auto& step : recent_lengths_) step.reserve(rows_.size());
    rows_behind_.reserve(rows_.size());
  }

  // The engine's thread calls the functions up to count_pending_jobs().

  void add_request(const StreamRequest& request) {
    const int64_t num_tokens = smaller(request.num_tokens, options_.capacity);
    const StopConditions& stop = request.stop;
    RowChange change{request.row, true, request.scope, {}, {request.tokens, request.tokens + num_tokens}, {stop, {}}};
    if (request.prompt_scope != nullptr) change.prompt_scope = *request.prompt_scope;
    change.stop.tokens.assign(stop.tokens, stop.tokens + stop.num_tokens);
    changes_.push_back(std::move(change));
  }

  void remove_request(int64_t row) { changes_.push_back({row, false, 0, {}, {}, {}}); }

  void append_text(const StreamText& text) {
    texts_.push_back({text.row, text.begins_text, text.scope, {text.tokens, text.tokens + text.num_tokens}});
  }

  StreamJob* create_job(const int32_t* rows, int64_t batch, bool writes_drafts) {
    while (!jobs_.empty() && jobs_.front()->is_done.load(std::memory_order_acquire)) jobs_.pop_front();
    auto job = std::make_unique<StreamJob>();
    job->drafter = this;
    job->rows.assign(rows, rows + batch);
    job->writes_drafts = writes_drafts;
    jobs_.push_back(std::move(job));
    jobs_.back()->changes.swap(changes_);
    jobs_.back()->texts.swap(texts_);
    return jobs_.back().get();
  }

  // Cancels the last job. Its changes and texts move to the next job.
  void cancel_job() {
    prepend(&jobs_.back()->changes, &changes_);
    prepend(&jobs_.back()->texts, &texts_);
    jobs_.pop_back();
  }

  int64_t count_pending_jobs() const {
    int64_t count = 0;
    for (const auto& job : jobs_) count += job->is_done.load(std::memory_order_acquire) ? 0 : 1;
    return count;
  }

  // Runs a job; the jobs run in stream order. A job waits while a piece of the store is copied to a file. No other call
  // may use the store while jobs are pending; if another call does, the job runs without the store.
  void run_job(StreamJob* job) noexcept {
    cpu::Store store;
    const StoreAccess& access = options_.draft.store.store;
    store_ = {};
    if (!cpu::open_store(access.words, access.num_words, &store)) return run_job_parts(job);
    const cpu::StoreLock lock(store);
    lock ? void(store_ = access) : cpu::count_skipped_call(store);
    run_job_parts(job);
  }

 private:
  // Moves the elements of `earlier` before those of `later`.
  template <class T>
  static void prepend(std::vector<T>* earlier, std::vector<T>* later) {
    std::move(later->begin(), later->end(), std::back_inserter(*earlier));
    later->swap(*earlier);
  }

  // Runs a job with store_, which has no words if the job must not use the store.
  void run_job_parts(StreamJob* job) noexcept {
    for (RowChange& change : job->changes) {
      if (change.row < 0 || change.row >= options_.num_rows) continue;
      end_request(change.row);
      if (change.adds_request) begin_request(&change);
    }
    const int64_t batch = static_cast<int64_t>(job->rows.size());
    for (int64_t i = 0; i < batch; ++i)
      num_sampled_[static_cast<size_t>(i)] = append_sampled_tokens(i, job->rows[static_cast<size_t>(i)]);
    if (job->writes_drafts) {
      if (batch > 0) draft(job->rows.data(), batch);
    } else {
      add_rows_behind(job->rows.data(), batch);
    }
    finish_step(job->rows.data(), batch);
    for (const TextChange& text : job->texts) append_to_text_row(text);
  }

  bool has_request(int64_t row_id) const {
    return row_id >= 0 && row_id < options_.num_rows && rows_[static_cast<size_t>(row_id)].has_request;
  }
  Row& row(int64_t row_id) { return rows_[static_cast<size_t>(row_id)]; }
  int32_t* tokens(int64_t row_id) { return tokens_.get() + row_id * options_.capacity; }
  TokenRows<const int32_t> all_tokens() const {
    return {tokens_.get(), options_.num_rows, options_.capacity, options_.capacity};
  }
  IndexAccess& index() { return options_.draft.index_propose.index; }

  // Ends a row's request. If the request has stopped, its text up to the stop is stored; otherwise, the text of the
  // last `lag` steps is not stored.
  void end_request(int64_t row_id) {
    Row& ended_row = row(row_id);
    if (!ended_row.has_request) return;
    cpu::Store store;
    if (cpu::open_store(store_.words, store_.num_words, &store)) {
      if (ended_row.stop_length != kNotStopped && ended_row.stop_length > ended_row.stored_length) {
        rows_to_store_[0] = static_cast<int32_t>(row_id);
        num_to_store_[0] = advance_stored_length(&ended_row, ended_row.stop_length);
        stored_lengths_[static_cast<size_t>(row_id)] = static_cast<int32_t>(ended_row.stored_length);
        store_rows(1);
      }
      if (row_id < store.num_slots) {
        cpu::TokenInserter inserter(store);
        cpu::close_slot(store, static_cast<uint32_t>(row_id), &inserter);
        if (ended_row.prompt_scope && prompt_slot(store, row_id) < store.num_slots)
          cpu::close_slot(store, static_cast<uint32_t>(prompt_slot(store, row_id)), &inserter);
      }
    }
    cpu::Arena arena;
    if (cpu::open_arena(index().words, index().num_words, &arena) && row_id < arena.num_slots)
      cpu::clear_slot(arena, static_cast<uint32_t>(row_id));
    size_t count = 0;
    for (const int32_t row_behind : rows_behind_) {
      if (row_behind != row_id) rows_behind_[count++] = row_behind;
    }
    rows_behind_.resize(count);
    ended_row.has_request = false;
    ended_row.length = lengths_[static_cast<size_t>(row_id)] = 0;
    ++ended_row.generation;
  }

  void begin_request(RowChange* change) {
    Row& new_row = row(change->row);
    std::copy(change->tokens.begin(), change->tokens.end(), tokens(change->row));
    new_row.has_request = true;
    new_row.length = new_row.stored_length = static_cast<int64_t>(change->tokens.size());
    new_row.stop_length = kNotStopped;
    new_row.scope = change->scope;
    new_row.prompt_scope = change->prompt_scope;
    std::swap(new_row.stop, change->stop);
    lengths_[static_cast<size_t>(change->row)] = static_cast<int32_t>(new_row.length);
    if (index().words != nullptr && new_row.length > 0) rows_behind_.push_back(static_cast<int32_t>(change->row));
  }

  // Appends the sampled tokens of the request at batch position i to its row, and returns the number of these tokens.
  int32_t append_sampled_tokens(int64_t i, int64_t row_id) {
    if (!has_request(row_id)) return 0;
    const int32_t* sampled_row = options_.sampled + i * (1 + options_.max_sampled);
    const int64_t count = larger<int64_t>(0, smaller<int64_t>(sampled_row[0], options_.max_sampled));
    Row& updated_row = row(row_id);
    for (int64_t j = 0; j < count && updated_row.length < options_.capacity; ++j) {
      tokens(row_id)[updated_row.length++] = sampled_row[1 + j];
      if (updated_row.stop_length == kNotStopped && updated_row.stop(tokens(row_id), updated_row.length))
        updated_row.stop_length = updated_row.length;
    }
    lengths_[static_cast<size_t>(row_id)] = static_cast<int32_t>(updated_row.length);
    return static_cast<int32_t>(count);
  }

  void draft(const int32_t* rows, int64_t batch) {
    DraftParams params = options_.draft;
    NgramProposeParams& p = params.index_propose.propose;
    const StreamDraftLayout layout(batch, p.lookup.k);
    p.token_ids = all_tokens();
    p.num_tokens = lengths_.data();
    p.row_indices = {rows, sizeof(int32_t)};
    p.num_sampled = num_sampled_.data();
    p.batch = batch;
    p.draft_token_ids = {options_.drafts, p.lookup.k, sizeof(int64_t)};
    p.num_draft_tokens = reinterpret_cast<int32_t*>(options_.drafts + layout.counts_offset);
    p.match_len = reinterpret_cast<int32_t*>(options_.drafts + layout.lengths_offset);
    const bool has_costs = params.index_propose.ladder.costs != nullptr || p.lookup.match_costs != nullptr;
    p.draft_costs = {has_costs ? options_.drafts + layout.costs_offset : nullptr, p.lookup.k};
    bool has_prompt_scopes = false;
    for (int64_t i = 0; i < batch; ++i) {
      const auto position = static_cast<size_t>(i);
      const bool is_used = has_request(rows[i]);
      scopes_[position] = is_used ? row(rows[i]).scope : 0;
      const std::optional<int64_t> prompt_scope = is_used ? row(rows[i]).prompt_scope : std::nullopt;
      has_prompt_scope_[position] = prompt_scope.has_value();
      prompt_scopes_[position] = prompt_scope.value_or(0);
      has_prompt_scopes |= prompt_scope.has_value();
    }
    params.store.store = store_;
    params.store.scopes = {scopes_.data(), sizeof(int64_t)};
    params.store.prompt_scopes = {prompt_scopes_.data(), sizeof(int64_t)};
    params.store.has_prompt_scope = has_prompt_scopes ? has_prompt_scope_.data() : nullptr;
    ngram_npu_cpu_draft(&params);
  }

  // Adds the rows of a job without drafts to rows_behind_, because no lookup has indexed their new tokens.
  void add_rows_behind(const int32_t* rows, int64_t batch) {
    if (index().words == nullptr) return;
    for (int64_t i = 0; i < batch; ++i) {
      const bool is_listed = std::find(rows_behind_.begin(), rows_behind_.end(), rows[i]) != rows_behind_.end();
      if (num_sampled_[static_cast<size_t>(i)] > 0 && !is_listed) rows_behind_.push_back(rows[i]);
    }
  }

  // Indexes missing text, records the lengths of the rows, and stores the text up to the lengths of `lag` steps ago. A
  // job without requests, such as a dummy run, is not a step of the engine and does not count.
  void finish_step(const int32_t* rows, int64_t batch) {
    index_rows_behind();
    if (std::none_of(rows, rows + batch, [this](int32_t row_id) { return has_request(row_id); })) return;
    auto& newest_lengths = recent_lengths_[next_step_];
    newest_lengths.clear();
    for (int64_t i = 0; i < batch; ++i) {
      if (num_sampled_[static_cast<size_t>(i)] == 0) continue;
      const Row& updated_row = row(rows[i]);
      newest_lengths.push_back({rows[i], updated_row.generation, smaller(updated_row.length, updated_row.stop_length)});
    }
    next_step_ = (next_step_ + 1) % recent_lengths_.size();
    int64_t count = 0;
    for (const RowLength& old_length : recent_lengths_[next_step_]) {
      Row& updated_row = row(old_length.row);
      if (updated_row.generation != old_length.generation || old_length.length <= updated_row.stored_length) continue;
      rows_to_store_[static_cast<size_t>(count)] = static_cast<int32_t>(old_length.row);
      num_to_store_[static_cast<size_t>(count++)] = advance_stored_length(&updated_row, old_length.length);
      stored_lengths_[static_cast<size_t>(old_length.row)] = static_cast<int32_t>(updated_row.stored_length);
    }
    recent_lengths_[next_step_].clear();
    if (count > 0) store_rows(count);
  }

  // Sets the stored length of a row and returns the increase.
  static int32_t advance_stored_length(Row* row, int64_t length) {
    return static_cast<int32_t>(length - std::exchange(row->stored_length, length));
  }

  // Inserts the new text of the first `count` rows of rows_to_store_ into the store: first all rows in their scopes,
  // then the rows that have a prompt scope in theirs. Overwrites rows_to_store_ and num_to_store_.
  void store_rows(int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      scopes_[static_cast<size_t>(i)] = row(rows_to_store_[static_cast<size_t>(i)]).scope;
    StoreInsertParams params{store_,
                             all_tokens(),
                             stored_lengths_.data(),
                             num_to_store_.data(),
                             {rows_to_store_.data(), sizeof(int32_t)},
                             {},
                             {scopes_.data(), sizeof(int64_t)},
                             count};
    cpu::insert_rows(params);
    size_t num_in_prompt_scopes = 0;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const std::optional<int64_t>& prompt_scope = row(rows_to_store_[i]).prompt_scope;
      if (!prompt_scope) continue;
      rows_to_store_[num_in_prompt_scopes] = rows_to_store_[i];
      num_to_store_[num_in_prompt_scopes] = num_to_store_[i];
      scopes_[num_in_prompt_scopes++] = *prompt_scope;
    }
    cpu::Store store;
    if (num_in_prompt_scopes == 0 || !cpu::open_store(store_.words, store_.num_words, &store)) return;
    for (size_t i = 0; i < num_in_prompt_scopes; ++i) prompt_slots_[i] = prompt_slot(store, rows_to_store_[i]);
    params.slot_indices = {prompt_slots_.data(), sizeof(int64_t)};
    params.batch = static_cast<int64_t>(num_in_prompt_scopes);
    cpu::insert_rows(params);
  }

  // Returns the slot for a row's text in its prompt scope.
  static int64_t prompt_slot(const cpu::Store& store, int64_t row_id) { return store.num_slots / 2 + row_id; }

  // Appends tokens to a text row and inserts them into the store.
  void append_to_text_row(const TextChange& text) {
    if (text.row < 0 || text.row >= options_.num_text_rows) return;
    const auto row_id = static_cast<int32_t>(text.row);
    const auto slot = static_cast<int32_t>(options_.num_rows + text.row);
    int32_t& length = text_lengths_[static_cast<size_t>(row_id)];
    if (text.begins_text) {
      cpu::Store store;
      if (cpu::open_store(store_.words, store_.num_words, &store) && text.row < store.num_slots - options_.num_rows) {
        cpu::TokenInserter inserter(store);
        cpu::close_slot(store, static_cast<uint32_t>(slot), &inserter);
      }
      length = 0;
      text_scopes_[static_cast<size_t>(row_id)] = text.scope;
    }
    const auto count = static_cast<int32_t>(
        smaller<int64_t>(static_cast<int64_t>(text.tokens.size()), options_.text_capacity - length));
    std::copy_n(text.tokens.begin(), count, text_tokens_.get() + text.row * options_.text_capacity + length);
    length += count;
    cpu::insert_rows({store_,
                      {text_tokens_.get(), options_.num_text_rows, options_.text_capacity, options_.text_capacity},
                      text_lengths_.data(),
                      &count,
                      {&row_id, sizeof(int32_t)},
                      {&slot, sizeof(int32_t)},
                      {&text_scopes_[static_cast<size_t>(row_id)], sizeof(int64_t)},
                      1});
  }

  // Indexes text of rows that are not completely indexed, in the order in which they were added to rows_behind_.
  void index_rows_behind() {
    if (rows_behind_.empty()) return;
    const LookupOptions& lookup = options_.draft.index_propose.propose.lookup;
    const LadderOptions& ladder = options_.draft.index_propose.ladder;
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

  StreamOptions options_;
  std::unique_ptr<int32_t[], FreeMemory> tokens_, text_tokens_;
  std::vector<Row> rows_;
  std::vector<int32_t> lengths_, stored_lengths_;    // per row
  std::vector<int32_t> num_sampled_, num_to_store_;  // per request of a batch
  std::vector<int64_t> scopes_, prompt_scopes_;      // per request of a batch
  std::vector<uint8_t> has_prompt_scope_;            // per request of a batch
  std::vector<int64_t> prompt_slots_;                // per row to store in a prompt scope
  std::vector<int32_t> rows_to_store_;
  std::vector<int32_t> rows_behind_;                    // rows that are not completely indexed
  std::vector<int64_t> num_indexed_;                    // per row of rows_behind_
  std::vector<int32_t> text_lengths_;                   // per text row
  std::vector<int64_t> text_scopes_;                    // per text row
  std::vector<std::vector<RowLength>> recent_lengths_;  // ring buffer of the last lag + 1 steps
  size_t next_step_ = 0;                                // index in recent_lengths_
  StoreAccess store_{};                                 // has no words if the running job must not use the store
  std::vector<RowChange> changes_;                      // for the next job
  std::vector<TextChange> texts_;                       // for the next job
  std::deque<std::unique_ptr<StreamJob>> jobs_;         // create_job() frees finished jobs
};

}  // namespace ngram_npu

using namespace ngram_npu;

namespace {

template <class Body>
int32_t catch_bad_alloc(Body&& body) {
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
  catch_bad_alloc([&] { drafter = new StreamDrafter(*options); });
  return drafter;
}

bool ngram_npu_cpu_stream_free(StreamDrafter* drafter) {
  if (drafter->count_pending_jobs() > 0) return false;
  delete drafter;
  return true;
}

int32_t ngram_npu_cpu_stream_add_request(StreamDrafter* drafter, const StreamRequest* request) {
  return catch_bad_alloc([&] { drafter->add_request(*request); });
}

int32_t ngram_npu_cpu_stream_remove_request(StreamDrafter* drafter, int64_t row) {
  return catch_bad_alloc([&] { drafter->remove_request(row); });
}

int32_t ngram_npu_cpu_stream_append_text(StreamDrafter* drafter, const StreamText* text) {
  return catch_bad_alloc([&] { drafter->append_text(*text); });
}

StreamJob* ngram_npu_cpu_stream_create_job(StreamDrafter* drafter, const int32_t* rows, int64_t batch,
                                           bool writes_drafts) {
  StreamJob* job = nullptr;
  catch_bad_alloc([&] { job = drafter->create_job(rows, batch, writes_drafts); });
  return job;
}

int32_t ngram_npu_cpu_stream_cancel_job(StreamDrafter* drafter) {
  return catch_bad_alloc([&] { drafter->cancel_job(); });
}

void ngram_npu_cpu_stream_run_job(void* data) {
  auto* const job = static_cast<StreamJob*>(data);
  job->drafter->run_job(job);
  job->is_done.store(true, std::memory_order_release);
}

int64_t ngram_npu_cpu_stream_count_pending_jobs(const StreamDrafter* drafter) { return drafter->count_pending_jobs(); }
