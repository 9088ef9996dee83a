// Tests StreamDrafter: compares the jobs on a late stream with a model that runs each step immediately. Rows are
// num_added while jobs are pending, requests are removed before or after their stop, text is stored
// only after a lag, requests have a second scope, other text is appended to text rows, and a store is saved at the same
// time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "choices.h"
#include "cpu/host_drafting.h"
#include "cpu/index_policy.h"
#include "entry_points.h"
#include "late_stream.h"

namespace ngram_npu::test {
namespace {

constexpr int64_t kRows = 5, kCapacity = 300, kDrafts = 4, kMaxSampled = kDrafts + 1, kPages = 80, kBlocks = 56,
                  kLineBits = 6, kTextRows = 2, kTextCapacity = 70, kFirstPromptSlot = kRows + kTextRows;

// The index and the store of a drafter or of the model.
struct Memory {
  explicit Memory(uint32_t visibility) : store(2 * kFirstPromptSlot, kBlocks, kLineBits, visibility) {}

  Index index{kRows, kPages};
  SharedStore store;
};

struct Request {
  std::vector<int32_t> text;
  int64_t scope = 0, num_stored = 0, text_end = -1;  // num_stored includes the prompt; text_end: -1 before the stop
  std::optional<int64_t> prompt_scope;
  std::vector<int32_t> stop_tokens;
  StopConditions stop{};

  // Returns whether a stop condition ends the text at its last token.
  bool has_reached_stop() const {
    const auto size = static_cast<int64_t>(text.size());
    for (const int32_t token : stop_tokens) {
      if (text.back() == token) return true;
    }
    if (size >= stop.max_length) return true;
    const int64_t output = size - stop.prompt_length;
    if (output < stop.min_output || stop.max_pattern == 0) return false;
    for (int64_t pattern_length = stop.min_pattern; pattern_length <= stop.max_pattern; ++pattern_length) {
      if (pattern_length * stop.min_count > output) return false;
      bool is_repeated = true;
      for (int64_t j = 1; j <= pattern_length * (stop.min_count - 1); ++j) {
        const auto position = static_cast<size_t>(size - j);
        is_repeated = is_repeated && text[position] == text[position - static_cast<size_t>(pattern_length)];
      }
      if (is_repeated) return true;
    }
    return false;
  }
};

// Options of the lookup, and the cost tables that they point to.
struct DraftOptions {
  std::vector<uint8_t> costs, store_costs;
  LookupOptions lookup;
  LadderOptions ladder;
};

// Runs each step immediately. Stores the text of a step `lag` steps later, request by request. Drafts from prompt
// scopes by a second call of ngram_store_step_.
class SynchronousModel {
 public:
  SynchronousModel(const DraftOptions& draft_options, uint32_t visibility, int64_t lag)
      : memory(visibility), draft_options_(draft_options), lag_(lag) {}

  void add_request(int64_t row, Request request) {
    remove_request(row);
    request.num_stored = static_cast<int64_t>(request.text.size());
    requests_[row] = std::move(request);
    ++generations_[row];
  }
  void remove_request(int64_t row) {
    Request& request = requests_[row];
    if (request.text.empty()) return;
    if (request.text_end > request.num_stored) store_text_of_rows({{row, generations_[row], request.text_end}});
    const int64_t slot = row, prompt_slot = kFirstPromptSlot + row;
    for (const int64_t* finished_slot : {&slot, &prompt_slot}) {
      const NgramStoreFinishParams finish{memory.store.access(), {finished_slot, 8}, 1};
      ngram_npu_cpu_ngram_store_finish_(&finish, nullptr);
    }
    const NgramIndexResetParams reset{memory.index.access({&slot, 8}), 1};
    ngram_npu_cpu_ngram_index_reset_(&reset, nullptr);
    request = {};
    ++generations_[row];
  }
  void append_text(const StreamText& text) {
    new_texts_.push_back({text, {text.tokens, text.tokens + text.num_tokens}});
  }
  // Runs a step and then stores the texts that were appended before the step. Returns its drafts.
  std::vector<uint8_t> run_step(const std::vector<int32_t>& rows, const std::vector<std::vector<int32_t>>& sampled,
                                bool writes_drafts) {
    std::vector<uint8_t> drafts = run_step_of_requests(rows, sampled, writes_drafts);
    for (const auto& [text, tokens] : new_texts_) {
      Request& row = text_rows_[text.row];
      const int64_t slot = kRows + text.row;
      if (text.begins_text) {
        const NgramStoreFinishParams finish{memory.store.access(), {&slot, 8}, 1};
        ngram_npu_cpu_ngram_store_finish_(&finish, nullptr);
        row = {};
        row.scope = text.scope;
      }
      row.text.insert(row.text.end(), tokens.begin(), tokens.end());
      row.text.resize(std::min<size_t>(row.text.size(), kTextCapacity));
      const auto size = static_cast<int64_t>(row.text.size());
      store_text(&row, slot, row.scope, size);
      row.num_stored = size;
    }
    new_texts_.clear();
    return drafts;
  }
  bool has_request(int64_t row) const { return !requests_[row].text.empty(); }
  bool is_full(int64_t row) const { return static_cast<int64_t>(requests_[row].text.size()) == kCapacity; }
  bool has_stopped(int64_t row) const { return requests_[row].text_end >= 0; }

  Memory memory;
  int64_t num_prompt_drafts = 0;  // number of drafts that text in a prompt scope changed

 private:
  // A row of a step whose text is not stored yet. length: number of tokens to store up to.
  struct StepRow {
    int64_t row, generation, length;
  };

  // Returns the drafts in the layout StreamDraftLayout. Rows without a request are padding: their tokens are ignored. A
  // step without requests does not count for the lag.
  std::vector<uint8_t> run_step_of_requests(const std::vector<int32_t>& rows,
                                            const std::vector<std::vector<int32_t>>& sampled, bool writes_drafts) {
    std::vector<StepRow> step_rows;
    std::vector<int32_t> counts;
    bool is_dummy_run = true;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0 || rows[i] >= kRows || !has_request(rows[i])) {
        counts.push_back(0);
        continue;
      }
      is_dummy_run = false;
      Request& request = requests_[rows[i]];
      counts.push_back(static_cast<int32_t>(sampled[i].size()));
      for (const int32_t token : sampled[i]) {
        if (static_cast<int64_t>(request.text.size()) == kCapacity) break;
        request.text.push_back(token);
        if (request.text_end < 0 && request.has_reached_stop())
          request.text_end = static_cast<int64_t>(request.text.size());
      }
      const auto size = static_cast<int64_t>(request.text.size());
      step_rows.push_back(
          {rows[i], generations_[rows[i]], request.text_end < 0 ? size : smaller(size, request.text_end)});
    }
    std::vector<uint8_t> drafts;
    if (writes_drafts) drafts = compute_drafts(rows, counts);
    if (is_dummy_run) return drafts;
    pending_steps_.push_back(step_rows);
    if (static_cast<int64_t>(pending_steps_.size()) > lag_) {
      store_text_of_rows(pending_steps_.front());
      pending_steps_.pop_front();
    }
    return drafts;
  }

  // Stores the text of rows in their scopes, then the text of those that have a prompt scope in these.
  void store_text_of_rows(std::vector<StepRow> rows) {
    const auto is_stored = [this](const StepRow& row) {
      return generations_[row.row] != row.generation || row.length <= requests_[row.row].num_stored;
    };
    rows.erase(std::remove_if(rows.begin(), rows.end(), is_stored), rows.end());
    for (const StepRow& row : rows) store_text(&requests_[row.row], row.row, requests_[row.row].scope, row.length);
    for (const StepRow& row : rows) {
      Request& request = requests_[row.row];
      if (request.prompt_scope) store_text(&request, kFirstPromptSlot + row.row, *request.prompt_scope, row.length);
      request.num_stored = row.length;
    }
  }

  // Stores the text of a row up to a length in a scope.
  void store_text(Request* row, int64_t slot, int64_t scope, int64_t length) {
    const auto count = static_cast<int32_t>(length - row->num_stored), end = static_cast<int32_t>(length);
    const int64_t row_index = 0;
    row->text.reserve(kCapacity);
    InsertParams params{};
    params.store = {memory.store.access(),
                    {row->text.data(), 1, kCapacity, kCapacity},
                    &end,
                    &count,
                    {&row_index, 8},
                    {&slot, 8},
                    {&scope, 8},
                    1};
    ngram_npu_cpu_insert_tokens(&params);
  }

  std::vector<uint8_t> compute_drafts(const std::vector<int32_t>& rows, const std::vector<int32_t>& counts) {
    const auto batch = static_cast<int64_t>(rows.size());
    std::vector<int32_t> text(kRows * kCapacity), lengths(kRows);
    std::vector<int64_t> scopes;
    for (int64_t r = 0; r < kRows; ++r) {
      const std::vector<int32_t>& row_text = requests_[r].text;
      std::copy(row_text.begin(), row_text.end(), text.begin() + r * kCapacity);
      lengths[static_cast<size_t>(r)] = static_cast<int32_t>(row_text.size());
    }
    for (const int32_t row : rows) scopes.push_back(row >= 0 && row < kRows ? requests_[row].scope : 0);
    const StreamDraftLayout layout(batch, kDrafts);
    std::vector<uint8_t> drafts(static_cast<size_t>(layout.total_bytes));
    DraftParams params{};
    NgramProposeParams& propose = params.index_propose.propose;
    propose.token_ids = {text.data(), kRows, kCapacity, kCapacity};
    propose.num_tokens = lengths.data();
    propose.row_indices = {rows.data(), 4};
    propose.num_sampled = counts.data();
    propose.batch = batch;
    propose.lookup = draft_options_.lookup;
    propose.draft_token_ids = {drafts.data(), kDrafts, 8};
    propose.num_draft_tokens = reinterpret_cast<int32_t*>(drafts.data() + layout.counts_offset);
    propose.match_len = reinterpret_cast<int32_t*>(drafts.data() + layout.lengths_offset);
    propose.draft_costs = {drafts.data() + layout.costs_offset, kDrafts};
    params.index_propose.index = memory.index.access();
    params.index_propose.catch_up_tokens = -1;
    params.index_propose.ladder = draft_options_.ladder;
    params.store = {memory.store.access(), {scopes.data(), 8}, draft_options_.store_costs.data(), 40};
    ngram_npu_cpu_draft(&params);
    for (int64_t i = 0; i < batch; ++i) {
      const int32_t row = rows[static_cast<size_t>(i)];
      if (row >= 0 && row < kRows && requests_[row].prompt_scope) replace_draft(i, params);
    }
    return drafts;
  }

  // Replaces a request's draft by a better one from its prompt scope. The call has no slot, so it stores no text.
  void replace_draft(int64_t i, const DraftParams& params) {
    const NgramProposeParams& propose = params.index_propose.propose;
    auto* const ids = static_cast<int64_t*>(propose.draft_token_ids.data) + i * kDrafts;
    std::vector<int32_t> draft(ids, ids + kDrafts);
    const int64_t row = propose.row_indices[i], no_slot = -1;
    NgramStoreStepParams step{};
    step.token_ids = propose.token_ids;
    step.num_tokens = propose.num_tokens;
    step.num_sampled = propose.num_sampled + i;
    step.store = memory.store.access();
    step.row_indices = {&row, 8};
    step.slot_indices = {&no_slot, 8};
    step.scopes = {&*requests_[row].prompt_scope, 8};
    step.batch = 1;
    step.draft_token_ids = {draft.data(), 1, kDrafts, kDrafts};
    step.num_draft_tokens = propose.num_draft_tokens + i;
    step.match_len = propose.match_len + i;
    step.draft_costs = {propose.draft_costs.data + i * kDrafts, 1, kDrafts, kDrafts};
    step.max_len = propose.lookup.max_len;
    step.fill = propose.lookup.fill;
    step.costs = params.store.costs;
    step.cost_limit = params.store.cost_limit;
    ngram_npu_cpu_ngram_store_step_(&step, nullptr);
    num_prompt_drafts += !std::equal(draft.begin(), draft.end(), ids);
    std::copy(draft.begin(), draft.end(), ids);
  }

  const DraftOptions& draft_options_;
  int64_t lag_;
  Request requests_[kRows], text_rows_[kTextRows];
  std::vector<std::pair<StreamText, std::vector<int32_t>>> new_texts_;
  int64_t generations_[kRows] = {};  // number of requests added to and removed from each row
  std::deque<std::vector<StepRow>> pending_steps_;
};

// Numbers of requests that were added while jobs were pending, or removed after or before their stop; numbers of drafts
// from the store and of texts that were appended to text rows.
struct EpisodeCounts {
  int64_t num_added = 0, num_removed_after_stop = 0, num_removed_before_stop = 0, num_store_drafts = 0, num_texts = 0,
          num_prompt_drafts = 0;
};

// Copies a store piece by piece in a thread, repeatedly, as an engine's thread does that saves the store.
class StoreCopier {
 public:
  explicit StoreCopier(Memory* memory) : memory_(memory), thread_([this] { copy_store(); }) {}
  StoreCopier(const StoreCopier&) = delete;
  StoreCopier& operator=(const StoreCopier&) = delete;

  // Stops copying. Returns whether the last complete copy is a valid store.
  bool stop_and_check(uint32_t visibility) {
    is_stopped_ = true;
    thread_.join();
    Memory loaded(visibility);
    const StoreAccess access = loaded.store.access();
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const auto count = static_cast<int64_t>(pieces_[i].size());
      const auto piece = static_cast<int64_t>(i);
      if (ngram_npu_cpu_ngram_store_unpack(access.words, access.num_words, piece, pieces_[i].data(), count) != 0)
        return false;
    }
    return loaded.store.find_fault() == kStoreFaultNone;
  }

 private:
  void copy_store() {
    const StoreAccess access = memory_->store.access();
    std::vector<uint32_t> buffer(static_cast<size_t>(kStorePieceWords));
    do {
      std::vector<std::vector<uint32_t>> pieces;
      const int64_t num_pieces = ngram_npu_cpu_ngram_store_pieces(access.words, access.num_words);
      while (static_cast<int64_t>(pieces.size()) < num_pieces) {
        const auto piece = static_cast<int64_t>(pieces.size());
        const int64_t count = ngram_npu_cpu_ngram_store_pack(access.words, access.num_words, piece, buffer.data());
        if (count >= 0) pieces.emplace_back(buffer.begin(), buffer.begin() + count);
      }
      pieces_.swap(pieces);
    } while (!is_stopped_);
  }

  Memory* memory_;
  std::atomic<bool> is_stopped_{false};
  std::vector<std::vector<uint32_t>> pieces_;
  std::thread thread_;
};

void run_episode(uint64_t seed, int num_steps, EpisodeCounts* counts) {
  RandomChoices choices(seed, num_steps);
  DraftOptions draft_options{std::vector<uint8_t>(kCostRows * kRowCostColumns),
                             std::vector<uint8_t>(kCostRows * store::kStoreCostColumns),
                             {1, kLadderMaxN, kDrafts, kCapacity, kLatest, choices.one_in(2), true, nullptr, 0},
                             {}};
  for (auto* table : {&draft_options.costs, &draft_options.store_costs}) {
    for (uint8_t& cost : *table) cost = static_cast<uint8_t>(choices.below(20));
  }
  draft_options.ladder = {true, draft_options.costs.data(), 40};
  const uint32_t visibility = choices.one_in(2) ? store::kLive : store::kFinish;
  const int64_t lag = choices.below(4);
  SynchronousModel model(draft_options, visibility, lag);
  Memory memory(visibility);
  std::vector<int32_t> staging(kRows * (1 + kMaxSampled));
  std::vector<uint8_t> drafts(static_cast<size_t>(StreamDraftLayout(kRows, kDrafts).total_bytes));
  StreamOptions options{kRows, kCapacity, kMaxSampled, lag, {}, staging.data(), drafts.data()};
  options.draft.index_propose.propose.lookup = draft_options.lookup;
  options.draft.index_propose.index = memory.index.access();
  options.draft.index_propose.ladder = draft_options.ladder;
  options.draft.store = {memory.store.access(), {}, draft_options.store_costs.data(), 40};
  options.num_text_rows = kTextRows;
  options.text_capacity = kTextCapacity;
  StreamDrafter* drafter = ngram_npu_cpu_stream_make(&options);
  ASSERT_NE(drafter, nullptr);
  const std::unique_ptr<StoreCopier> copier(seed % 3 == 0 ? new StoreCopier(&memory) : nullptr);

  std::deque<std::pair<std::vector<uint8_t>, std::vector<uint8_t>>> results;  // expected and actual drafts per step
  {
    LateStream stream;
    const int64_t vocab_size = choices.between(3, 6);
    while (choices.has_next_event()) {
      std::vector<int32_t> rows;
      for (int32_t row = 0; row < kRows; ++row) {
        if (model.has_request(row) && (model.is_full(row) || choices.one_in(model.has_stopped(row) ? 2 : 25))) {
          ngram_npu_cpu_stream_remove_request(drafter, row);
          counts->num_removed_after_stop += model.has_stopped(row);
          counts->num_removed_before_stop += !model.has_stopped(row) && lag > 0;
          model.remove_request(row);
        }
        if (!model.has_request(row) && choices.one_in(3)) {
          Request request;
          for (int64_t n = choices.between(1, choices.one_in(10) ? kCapacity : 40); n > 0; --n)
            request.text.push_back(static_cast<int32_t>(choices.below(vocab_size)));
          request.scope = choices.below(2);
          if (choices.one_in(2)) request.prompt_scope = choices.between(1, 3);
          request.stop.prompt_length = static_cast<int64_t>(request.text.size());
          request.stop.max_length = choices.one_in(2) ? INT64_MAX : request.stop.prompt_length + choices.below(60);
          if (choices.one_in(2)) request.stop_tokens = {static_cast<int32_t>(vocab_size)};
          if (choices.one_in(3)) {
            request.stop.min_output = choices.below(10);
            request.stop.min_pattern = choices.between(1, 2);
            request.stop.max_pattern = choices.between(2, 5);
            request.stop.min_count = choices.between(2, 4);
          }
          StreamRequest stream_request{row, request.scope, request.text.data(),
                                       static_cast<int64_t>(request.text.size()), request.stop};
          stream_request.stop.tokens = request.stop_tokens.data();
          stream_request.stop.num_tokens = static_cast<int64_t>(request.stop_tokens.size());
          if (request.prompt_scope) stream_request.prompt_scope = &*request.prompt_scope;
          ngram_npu_cpu_stream_add_request(drafter, &stream_request);
          counts->num_added += ngram_npu_cpu_stream_count_pending_jobs(drafter) > 0;
          model.add_request(row, std::move(request));
        }
        if (model.has_request(row) ? !choices.one_in(4) : choices.one_in(8)) rows.push_back(row);
      }
      if (choices.one_in(5)) rows.clear();  // a dummy run
      if (choices.one_in(8) && static_cast<int64_t>(rows.size()) < kRows)
        rows.push_back(choices.one_in(2) ? -1 : kRows);
      std::vector<std::vector<int32_t>> sampled(rows.size());
      std::vector<int32_t> sampled_buffer;
      for (std::vector<int32_t>& row_sampled : sampled) {
        for (int64_t n = choices.below(kMaxSampled + 1); n > 0; --n)
          row_sampled.push_back(static_cast<int32_t>(choices.one_in(30) ? vocab_size : choices.below(vocab_size)));
        sampled_buffer.push_back(static_cast<int32_t>(row_sampled.size()));
        sampled_buffer.insert(sampled_buffer.end(), row_sampled.begin(), row_sampled.end());
        sampled_buffer.resize(sampled_buffer.size() + static_cast<size_t>(kMaxSampled) - row_sampled.size(), -1);
      }
      while (choices.one_in(3)) {
        std::vector<int32_t> tokens;
        for (int64_t n = choices.below(30); n > 0; --n)
          tokens.push_back(static_cast<int32_t>(choices.below(vocab_size)));
        const StreamText text{choices.below(kTextRows), choices.one_in(4), choices.below(2), tokens.data(),
                              static_cast<int64_t>(tokens.size())};
        ngram_npu_cpu_stream_append_text(drafter, &text);
        model.append_text(text);
        ++counts->num_texts;
      }
      const bool writes_drafts = !choices.one_in(4);
      const auto batch = static_cast<int64_t>(rows.size());
      StreamJob* job = ngram_npu_cpu_stream_create_job(drafter, rows.data(), batch, writes_drafts);
      if (job != nullptr && choices.one_in(8)) {
        ngram_npu_cpu_stream_cancel_job(drafter);
        job = ngram_npu_cpu_stream_create_job(drafter, rows.data(), batch, writes_drafts);
      }
      ASSERT_NE(job, nullptr);
      results.emplace_back(model.run_step(rows, sampled, writes_drafts), std::vector<uint8_t>());
      auto* actual = &results.back().second;
      const auto bytes = writes_drafts ? StreamDraftLayout(batch, kDrafts).total_bytes : 0;
      stream.add_task([=, &staging] { std::copy(sampled_buffer.begin(), sampled_buffer.end(), staging.begin()); });
      stream.add_task([=] { ngram_npu_cpu_stream_run_job(job); });
      stream.add_task([=, &drafts] { actual->assign(drafts.begin(), drafts.begin() + bytes); });
    }
  }
  EXPECT_EQ(ngram_npu_cpu_stream_count_pending_jobs(drafter), 0);
  if (copier != nullptr) {
    EXPECT_TRUE(copier->stop_and_check(visibility)) << "seed " << seed;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ASSERT_EQ(results[i].second, results[i].first) << "seed " << seed << ", step " << i << ", lag " << lag;
  }
  ASSERT_EQ(memory.store, model.memory.store) << "seed " << seed;
  counts->num_store_drafts += static_cast<int64_t>(memory.store[store::kStatDrafts]);
  counts->num_prompt_drafts += model.num_prompt_drafts;
  EXPECT_TRUE(ngram_npu_cpu_stream_free(drafter));
}

TEST(StreamDrafterTest, DraftsEqualThoseOfImmediateSteps) {
  EpisodeCounts counts;
  const char* variable = std::getenv("NGRAM_NPU_STREAM_EPISODES");  // set by `make prove`
  const uint64_t num_episodes = variable != nullptr ? std::strtoull(variable, nullptr, 10) : 40;
  for (uint64_t seed = 1; seed <= num_episodes; ++seed) run_episode(seed, 100, &counts);
  EXPECT_GT(counts.num_added, 1000);
  EXPECT_GT(counts.num_removed_after_stop, 100);
  EXPECT_GT(counts.num_removed_before_stop, 50);
  EXPECT_GT(counts.num_store_drafts, 500);
  EXPECT_GT(counts.num_texts, 1000);
  EXPECT_GT(counts.num_prompt_drafts, 200);
}

// A drafter of one request with the text 1, 2, 3 in row 0. It can draft only text of a store, because the row has no
// repeated tokens.
class OneRequestDrafter {
 public:
  explicit OneRequestDrafter(StoreAccess store) {
    StreamOptions options{kRows, kCapacity, kMaxSampled, 0, {}, staging_.data(), drafts_.data()};
    options.draft.index_propose.propose.lookup = {1, 4, kDrafts, kCapacity, kLatest, true, true, nullptr, 0};
    options.draft.store = {store, {}, costs_.data(), 40};
    drafter_ = ngram_npu_cpu_stream_make(&options);
    const int32_t text[] = {1, 2, 3};
    const StreamRequest request{0, 0, text, 3, {nullptr, 0, INT64_MAX, 0, 0, 0, 0, 0}};
    EXPECT_EQ(ngram_npu_cpu_stream_add_request(drafter_, &request), kOk);
  }
  OneRequestDrafter(const OneRequestDrafter&) = delete;
  OneRequestDrafter& operator=(const OneRequestDrafter&) = delete;
  ~OneRequestDrafter() { EXPECT_TRUE(free()); }

  StreamJob* create_job() {
    const int32_t row = 0;
    return ngram_npu_cpu_stream_create_job(drafter_, &row, 1, true);
  }
  bool free() const { return ngram_npu_cpu_stream_free(drafter_); }

 private:
  std::vector<uint8_t> costs_ = std::vector<uint8_t>(kCostRows * store::kStoreCostColumns);
  std::vector<int32_t> staging_ = std::vector<int32_t>(kRows * (1 + kMaxSampled), 1);
  std::vector<uint8_t> drafts_ =
      std::vector<uint8_t>(static_cast<size_t>(StreamDraftLayout(kRows, kDrafts).total_bytes));
  StreamDrafter* drafter_;
};

// Two calls must not use a store at the same time. If a call finds the store in use, for example by the drafter of a
// second engine, the call skips the store, and the statistics count the skipped call.
TEST(StreamDrafterTest, JobSkipsStoreInUse) {
  SharedStore store(kRows, kBlocks, kLineBits);
  OneRequestDrafter drafter(store.access());
  store[store::kHeaderLock] = 1;
  Words expected = store;
  ngram_npu_cpu_stream_run_job(drafter.create_job());
  ++expected[store::kStatSkippedCalls];
  EXPECT_EQ(store, expected);
  std::vector<uint32_t> piece(static_cast<size_t>(kStorePieceWords));
  EXPECT_EQ(ngram_npu_cpu_ngram_store_pack(store.data(), store.count(), 0, piece.data()), -1);
  EXPECT_EQ(store, expected);
}

TEST(StreamDrafterTest, DrafterWithPendingJobIsNotFreed) {
  OneRequestDrafter drafter({});
  StreamJob* job = drafter.create_job();
  EXPECT_FALSE(drafter.free());
  ngram_npu_cpu_stream_run_job(job);
}

TEST(StreamDrafterTest, JobIndexesAtMostItsBudgetForAllRows) {
  constexpr int64_t kPrompt = 5000;
  const std::vector<int32_t> text(kPrompt, 3);
  std::vector<int32_t> staging(3 * (1 + kMaxSampled), 1);
  std::vector<uint8_t> drafts(static_cast<size_t>(StreamDraftLayout(3, kDrafts).total_bytes));
  Index index(3, 64);
  StreamOptions options{3, kPrompt + 100, kMaxSampled, 0, {}, staging.data(), drafts.data()};
  options.draft.index_propose.propose.lookup = {1, 4, kDrafts, kPrompt, kLatest, true, true, nullptr, 0};
  options.draft.index_propose.index = index.access();
  StreamDrafter* drafter = ngram_npu_cpu_stream_make(&options);
  const int32_t rows[] = {0, 1, 2};
  for (const int64_t row : rows) {
    const StreamRequest request{row, 0, text.data(), kPrompt, {nullptr, 0, INT64_MAX, 0, 0, 0, 0, 0}};
    ASSERT_EQ(ngram_npu_cpu_stream_add_request(drafter, &request), kOk);
  }
  for (int64_t job = 1; job < 4; ++job) {
    ngram_npu_cpu_stream_run_job(ngram_npu_cpu_stream_create_job(drafter, rows, 3, job != 2));
    int64_t lengths[3];
    ngram_npu_cpu_ngram_index_lengths(index.data(), index.count(), rows, 3, lengths);
    EXPECT_EQ(lengths[0] + lengths[1] + lengths[2], smaller(job * cpu::kMaxStreamCatchUpTokens, 3 * (kPrompt + job)));
  }
  EXPECT_TRUE(ngram_npu_cpu_stream_free(drafter));
}

}  // namespace
}  // namespace ngram_npu::test
